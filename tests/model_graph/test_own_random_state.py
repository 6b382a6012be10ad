"""An interval's random numbers follow from its key alone, and nobody else's follow from them."""

import torch

from socflower.model_graph.random_state import own_random_state


def drawn(*key: int) -> list[float]:
    with own_random_state(*key):
        values: list[float] = torch.rand(4).tolist()
    return values


def test_equal_keys_draw_equal_numbers_and_others_do_not() -> None:
    torch.manual_seed(1)
    first = drawn(1, 2, 3)
    torch.manual_seed(2)
    assert drawn(1, 2, 3) == first
    assert (
        len({tuple(drawn(*key)) for key in ((1, 2, 3), (2, 1, 3), (1, 2, 4), (1, 2), (12, 3))}) == 5
    )


def test_the_callers_random_numbers_stay_as_they_were() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    drawn(1)
    assert torch.equal(torch.rand(3), expected)
