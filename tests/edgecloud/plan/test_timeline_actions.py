"""Actions as integers: what is sent comes back, and junk does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.plan.timeline_actions import Action, Kind, decode_actions, encode_actions
from socflower.errors import ConfigError

ACTIONS = st.lists(st.builds(Action, st.sampled_from(Kind), st.integers(0, 1023), st.integers(0, 2**28 - 1),
                             st.none() | st.integers(0, 510), st.sampled_from([2, 4, 8, 16, 32]),
                             st.integers(0, 1023)), max_size=30)


@given(actions=ACTIONS)
def test_actions_come_back_as_they_were_sent(actions: list[Action]) -> None:
    words = encode_actions(actions)
    assert decode_actions(words) == tuple(actions)
    assert len(words) == len(actions) + 2 and all(0 <= word < 2**62 for word in words)


@given(actions=ACTIONS.filter(bool), at=st.integers(0, 31), flip=st.integers(0, 61))
def test_a_changed_bit_is_noticed(actions: list[Action], at: int, flip: int) -> None:
    words = encode_actions(actions)
    words[at % len(words)] ^= 1 << flip
    with pytest.raises(ConfigError):
        decode_actions(words)


@given(words=st.lists(st.integers(-2**63, 2**63), max_size=5))
def test_junk_is_refused(words: list[int]) -> None:
    if words[:2] != [1, 0]:
        with pytest.raises(ConfigError, match="actions: "):
            decode_actions(words)


@pytest.mark.parametrize("words", [[True, 0], [1.0, 0], [1, 0, "x"], ["1"], [2, 0], [], [1]])
def test_what_is_no_list_of_actions_is_one_line(words: list[object]) -> None:
    with pytest.raises(ConfigError, match="actions: ") as caught:
        decode_actions(words)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("action", [
    Action(Kind.FORWARD, 1024, 0, 0), Action(Kind.FORWARD, 0, 2**28, 0), Action(Kind.FORWARD, 0, 0, 511),
    Action(Kind.FORWARD, 0, 0, 0, 32, 1024), Action(Kind.FORWARD, 0, -1, 0),
])
def test_what_does_not_fit_is_refused(action: Action) -> None:
    with pytest.raises(ConfigError, match="does not fit into"):
        encode_actions([action])
