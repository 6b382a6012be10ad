"""Actions as bytes: what is sent comes back, and junk does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.plan.timeline_actions import (
    Action,
    ActionKind,
    decode_actions,
    encode_actions,
)
from socflower.errors import ConfigError

ACTIONS = st.lists(
    st.builds(
        Action,
        st.sampled_from(ActionKind),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1),
        st.none() | st.integers(0, 2**16 - 2),
        st.sampled_from([2, 4, 8, 16, 32]),
        st.integers(0, 2**16 - 1),
    ),
    max_size=30,
)


@given(actions=ACTIONS)
def test_actions_come_back_as_they_were_sent(actions: list[Action]) -> None:
    encoded = encode_actions(actions)
    assert decode_actions(encoded) == tuple(actions)
    assert len(encoded) == 12 * len(actions) + 5


@given(actions=ACTIONS.filter(bool), at=st.integers(0, 400), flip=st.integers(0, 7))
def test_a_changed_bit_is_noticed(actions: list[Action], at: int, flip: int) -> None:
    encoded = bytearray(encode_actions(actions))
    encoded[at % len(encoded)] ^= 1 << flip
    with pytest.raises(ConfigError):
        decode_actions(bytes(encoded))


@given(actions=ACTIONS.filter(bool), lost=st.integers(1, 400))
def test_lost_bytes_are_noticed(actions: list[Action], lost: int) -> None:
    encoded = encode_actions(actions)
    with pytest.raises(ConfigError, match="actions: "):
        decode_actions(encoded[:-lost])


@given(junk=st.binary(max_size=40))
def test_junk_is_refused(junk: bytes) -> None:
    if junk != encode_actions([]):
        with pytest.raises(ConfigError, match="actions: ") as caught:
            decode_actions(junk)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "action",
    [
        Action(ActionKind.FORWARD, 2**16, 0, 0),
        Action(ActionKind.FORWARD, 0, 2**32, 0),
        Action(ActionKind.FORWARD, 0, 0, 2**16 - 1),
        Action(ActionKind.FORWARD, 0, 0, 0, 32, 2**16),
        Action(ActionKind.FORWARD, 0, -1, 0),
    ],
)
def test_what_does_not_fit_is_refused(action: Action) -> None:
    with pytest.raises(ConfigError, match="does not fit into"):
        encode_actions([action])
