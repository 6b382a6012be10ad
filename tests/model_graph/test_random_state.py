"""Torch's global generator: whoever forks it is alone, and leaves no trace."""

import threading

import torch
from torch import nn

from socflower.model_graph.random_state import (
    build_exclusively,
    forked_generator,
    own_random_state,
)


def drawn(seed: int) -> list[float]:
    return torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()


def test_with_a_seed_it_draws_what_a_generator_of_its_own_does_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    with forked_generator(5):
        assert torch.rand(3).tolist() == drawn(5)
        with forked_generator(6):
            assert torch.rand(3).tolist() == drawn(6)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_it_goes_on_from_where_it_stands() -> None:
    with forked_generator(5):
        with forked_generator():
            first = torch.rand(3)
        assert torch.equal(torch.rand(3), first)


def test_another_thread_waits_until_the_generator_is_free() -> None:
    inside = threading.Event()

    def disturb() -> None:
        with forked_generator(7):
            torch.rand(100)
            inside.set()

    def build() -> None:
        build_exclusively(lambda: (torch.manual_seed(8), nn.Linear(30, 30), inside.set()))

    for other in (disturb, build):
        inside.clear()
        thread = threading.Thread(target=other, daemon=True)
        with forked_generator(5):
            thread.start()
            # A slow machine can only fail to find a fault.
            assert not inside.wait(0.1)
            assert torch.rand(3).tolist() == drawn(5)
        thread.join(60.0)
        assert inside.is_set()


def drawn_by(*key: int) -> list[float]:
    with own_random_state(*key):
        values: list[float] = torch.rand(4).tolist()
    return values


def test_equal_keys_draw_equal_numbers_and_others_do_not_and_the_caller_s_stay() -> None:
    torch.manual_seed(1)
    first = drawn_by(1, 2, 3)
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    assert drawn_by(1, 2, 3) == first
    assert torch.equal(torch.rand(3), expected)
    keys = ((1, 2, 3), (2, 1, 3), (1, 2, 4), (1, 2), (12, 3))
    assert len({tuple(drawn_by(*key)) for key in keys}) == 5
