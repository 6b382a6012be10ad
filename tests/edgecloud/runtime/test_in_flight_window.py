"""Bounded staleness: no batch is ever staler than K, in whatever time gradients come back."""

from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.runtime.in_flight_window import ReplayWindow
from tests.one_line import refused

# What comes next: go forward if that is allowed, apply a gradient if there is one, or another K.
EVENTS = st.lists(st.one_of(st.just("forward"), st.just("close"), st.integers(0, 6)), max_size=150)


@given(limit=st.integers(0, 6), first=st.integers(0, 1000), events=EVENTS)
def test_staleness_never_exceeds_the_window_in_force_when_the_newest_batch_went_forward(
    limit: int,
    first: int,
    events: list[str | int],
) -> None:
    """Against a list of the batches that are out; a random order of events stands for random delays."""
    window, out, coming = ReplayWindow(limit), [], first
    in_force = limit
    for event in events:
        if isinstance(event, int):
            limit = event
            window.resize(limit)
        elif event == "forward":
            # F23: blocked while t - t' > K.
            assert window.may_forward() == (not out or coming - out[0] <= limit)
            if window.may_forward():
                window.forward(coming)
                out.append(coming)
                coming, in_force = coming + 1, limit
        elif out:
            assert window.close(out[0]) == out[-1] - out[0] <= in_force
            out.pop(0)
        assert list(window.in_flight) == out
        assert window.oldest == (out[0] if out else None)
        assert window.drained == (not out)


@given(limit=st.integers(0, 9))
def test_as_many_batches_go_forward_as_the_window_allows_and_no_more(limit: int) -> None:
    window, batch = ReplayWindow(limit), 0
    while window.may_forward():
        window.forward(batch)
        batch += 1
    assert batch == limit + 1
    assert window.close(0) == limit
    assert window.may_forward()


@given(num_batches=st.integers(1, 20))
def test_a_window_of_none_alternates_strictly(num_batches: int) -> None:
    window = ReplayWindow(0)
    for batch in range(num_batches):
        assert window.may_forward() and window.drained
        window.forward(batch)
        assert not window.may_forward()
        assert window.close(batch) == 0


@given(wide=st.integers(1, 8), narrow=st.integers(0, 8))
def test_a_smaller_window_blocks_until_it_has_drained_to_its_size(wide: int, narrow: int) -> None:
    window = ReplayWindow(wide)
    for batch in range(wide + 1):
        window.forward(batch)
    window.resize(narrow)
    closed = 0
    while not window.may_forward():
        window.close(closed)
        closed += 1
    assert closed == max(0, wide + 1 - narrow)
    window.forward(wide + 1)
    assert len(window.in_flight) <= narrow + 1


def test_a_gradient_is_applied_to_the_oldest_batch_alone() -> None:
    window = ReplayWindow(2)
    for batch in (7, 8, 9):
        window.forward(batch)
    refused(lambda: window.close(8), "batch 8", "[7, 8, 9]")
    for unknown in (6, 10, -1):
        refused(lambda unknown=unknown: window.close(unknown), f"batch {unknown}", "[7, 8, 9]")  # type: ignore[misc]
    assert list(window.in_flight) == [7, 8, 9]
    assert window.close(7) == 2
    # A gradient comes twice.
    refused(lambda: window.close(7), "batch 7", "[8, 9]")


def test_batches_go_forward_one_after_the_other_each_once() -> None:
    window = ReplayWindow(3)
    refused(lambda: window.forward(-1), "-1", "0")
    window.forward(4)
    for wrong in (4, 6, 0):
        refused(lambda wrong=wrong: window.forward(wrong), f"batch {wrong}", "5")  # type: ignore[misc]
    window.close(4)
    # Not even once all are closed.
    refused(lambda: window.forward(4), "batch 4", "5")
    assert window.oldest is None


def test_a_full_window_takes_no_batch() -> None:
    window = ReplayWindow(1)
    window.forward(0)
    window.forward(1)
    refused(lambda: window.forward(2), "batch 2", "[0, 1]", "K = 1")


def test_a_new_window_has_nothing_out() -> None:
    window = ReplayWindow(1)
    assert (window.drained, window.oldest, list(window.in_flight)) == (True, None, [])
    refused(lambda: window.close(0), "batch 0")


def test_a_window_is_not_negative() -> None:
    refused(lambda: ReplayWindow(-1), "K = -1")
    refused(lambda: ReplayWindow(3).resize(-2), "K = -2")
