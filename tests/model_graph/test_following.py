"""A graph stands for every call of a model: what another call would compute differently is refused in one line."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from socflower.model_graph.chain import capture_chain
from socflower.model_graph.following import CaptureFailed, KeepsState
from socflower.model_graph.graph import capture
from tests.one_line import one_line


class Step(nn.Module):
    """A layer with one habit."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.linear = habit, nn.Linear(4, 4)
        self.h: Tensor | None = None
        self.calls, self.log = 0, list[Tensor]()
        self.n: Tensor
        self.register_buffer("n", torch.zeros(()))
        self.plain = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self, self.habit)(x, self.linear(x))
        return result

    def adds_its_last_result(self, x: Tensor, y: Tensor) -> Tensor:
        z = y if self.h is None else y + self.h.mean(0)
        self.h = z.detach()
        return z

    def asks_whether_it_has_one(self, x: Tensor, y: Tensor) -> Tensor:
        z = y if self.h is None else torch.relu(y)
        self.h = y
        return z

    def multiplies_by_its_calls(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return y * self.calls

    def reads_a_list(self, x: Tensor, y: Tensor) -> Tensor:
        self.log.append(y)
        return y + self.log[0]

    def counts(self, x: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        return y

    def replaces_a_buffer(self, x: Tensor, y: Tensor) -> Tensor:
        self.n = self.n + 1
        return y

    def decays_a_buffer(self, x: Tensor, y: Tensor) -> Tensor:
        self.n.mul_(0.9).add_(y.mean())
        return y

    def counts_in_a_plain_tensor(self, x: Tensor, y: Tensor) -> Tensor:
        self.plain += 1
        return y * self.plain

    def draws(self, x: Tensor, y: Tensor) -> Tensor:
        return y + torch.rand(4)

    def draws_with_numpy(self, x: Tensor, y: Tensor) -> Tensor:
        return y * np.random.rand()

    def skips_at_random(self, x: Tensor, y: Tensor) -> Tensor:
        return y if random.random() < 2.0 else x

    def notes(self, x: Tensor, y: Tensor) -> Tensor:
        self.h, self.calls = y.detach(), self.calls + 1
        self.log.append(y)
        return y

    def caches(self, x: Tensor, y: Tensor) -> Tensor:
        if self.h is None:
            self.h = torch.arange(4.0)
        return y + self.h

    def draws_like_its_input(self, x: Tensor, y: Tensor) -> Tensor:
        return y + torch.rand_like(y)

    def averages_into_a_buffer(self, x: Tensor, y: Tensor) -> Tensor:
        self.n.add_(y.mean())
        return y


REFUSED = {
    "adds_its_last_result": "'1.h'",
    "asks_whether_it_has_one": "'1.h'",
    "multiplies_by_its_calls": "'1.calls'",
    "reads_a_list": "second call",
    "counts": "'1.n'",
    "replaces_a_buffer": "'1.n'",
    "decays_a_buffer": "'1.n'",
    "counts_in_a_plain_tensor": "'1.plain'",
}


@pytest.mark.parametrize("habit", REFUSED)
def test_a_model_that_remembers_between_calls_is_refused_by_the_name_of_what_it_keeps(
    habit: str,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Step(habit), nn.Linear(4, 2))
    for read in (capture, capture_chain):
        with pytest.raises(KeepsState) as caught:
            read(model, (4,), name="mine")
        one_line(str(caught.value), "model mine: ", REFUSED[habit])
        assert caught.value.module == ("" if habit == "reads_a_list" else "1")


@pytest.mark.parametrize("habit", ["draws", "draws_with_numpy", "skips_at_random"])
def test_a_layer_that_draws_without_its_input_is_refused_and_a_piece_of_a_chain_as_a_whole(
    habit: str,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Step(habit), nn.Linear(4, 2))
    with pytest.raises(CaptureFailed, match="Step draws random numbers") as caught:
        capture(model, (4,))
    assert caught.value.module == "1"
    operations = capture_chain(model, (4,)).graph.operations
    assert [one.module for one in operations if one.module] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "habit", ["notes", "caches", "draws_like_its_input", "averages_into_a_buffer"]
)
def test_what_no_later_call_reads_does_not_hinder(habit: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Step(habit), nn.Linear(4, 2))
    graph = capture(model, (4,))
    assert {one.module for one in graph.operations} >= {"0", "1.linear", "2"}
    assert len(graph.evaluation) == len(graph.operations)
