"""Actions as bytes: what is sent comes back, and junk does not."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.plan.timeline_actions import (
    Action,
    ActionKind,
    decode_actions,
    encode_actions,
    next_action,
)
from tests.one_line import refused

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
    refused(lambda: decode_actions(bytes(encoded)))


@given(actions=ACTIONS.filter(bool), lost=st.integers(1, 400))
def test_lost_bytes_are_noticed(actions: list[Action], lost: int) -> None:
    refused(lambda: decode_actions(encode_actions(actions)[:-lost]), "actions")


@given(junk=st.binary(max_size=40).filter(lambda junk: junk != encode_actions([])))
def test_junk_is_refused(junk: bytes) -> None:
    refused(lambda: decode_actions(junk), "actions")


@pytest.mark.parametrize(
    "numbers", [(2**16, 0, 0), (0, 2**32, 0), (0, 0, 2**16 - 1), (0, 0, 0, 32, 2**16), (0, -1, 0)]
)
def test_what_does_not_fit_is_refused(numbers: tuple[int, ...]) -> None:
    action = Action(ActionKind.FORWARD, *numbers)
    refused(lambda: encode_actions([action]), "actions", str(action))


def test_a_front_half_alternates_drains_before_it_moves_and_never_waits_with_work() -> None:
    names = ("allowed", "link_is_idle", "has_gradient", "just_applied", "is_drained")
    for values in product((False, True), repeat=len(names)):
        now = dict(zip(names, values, strict=True))
        action = next_action(**now)
        ready = now["allowed"] and now["link_is_idle"]
        if ready and now["has_gradient"]:
            # Never two updates in a row, nor two forward passes.
            expected = ActionKind.FORWARD if now["just_applied"] else ActionKind.APPLY
            assert action is expected
        assert (action is None) <= (not ready and not now["has_gradient"])
        assert (action is ActionKind.RECUT) <= (now["is_drained"] and not now["allowed"])
