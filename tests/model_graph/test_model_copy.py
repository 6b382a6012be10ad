"""Whatever reads a model runs copies: the user's model, and the generators, are afterwards as they were."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower import HalvesProgram, LayeredProgram, parse_cluster, pipeline_problem, profile_module
from socflower.errors import ConfigError
from socflower.model_graph.chain import capture_chain
from socflower.model_graph.cut_points import capture_split, whole_front
from socflower.model_graph.graph import capture
from socflower.model_graph.model_copy import copied
from socflower.model_graph.parts import random_streams
from socflower.model_graph.random_state import generator_states, same_states
from socflower.pipeline.profiler.measuring import measure_layers
from socflower.precision.int8.model import Int8Model
from tests.one_line import refused
from tests.seeded import built

SHAPE = (4,)


class Busy(nn.Module):
    """Everything that a pass can leave behind: constants, attributes, statistics, random draws, a result with a graph.

    With `memory` its next call also reads what it has stored.
    """

    def __init__(self, *, memory: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.frozen, self.last = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 3),
        )
        self.memory = memory
        self.kept: Any = None
        self.seen: list[Any] = []
        # Torch copies no such tensor.
        self.result = self.last.weight.sum() * 2.0
        self.eval()
        self.norm.train()
        self.first.register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.seen.append(output)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(
            self.norm(self.first(inputs)) + torch.tensor([1.0, 2.0, float("nan"), 4.0]).nan_to_num()
        )
        if self.memory and self.kept is not None:
            hidden = hidden + self.kept.mean(0)
        self.kept = hidden.detach()
        return self.last(functional.dropout(self.frozen(hidden), 0.5, self.training))


def measured(model: nn.Module) -> None:
    measure_layers(model, SHAPE, (2, 3), repeats=1)


def problem(model: nn.Module) -> None:
    cluster = parse_cluster(
        {"boards": 2, "socs_per_board": 1, "device": "raspberry-pi-4b", "soc_bytes_per_s": 1e7}
    )
    pipeline_problem(model, SHAPE, cluster, batch_size=4)


def layered(model: nn.Module) -> None:
    program = LayeredProgram(model_fn=lambda: model, example=SHAPE, frozen="norm")
    labels = np.arange(2)
    program.front(0, None, lambda batch: (torch.ones(2, 4), labels, labels)).half.train_alone(0)


def int8(model: nn.Module) -> None:
    Int8Model.from_module(model, input_shape=SHAPE, unsupported="fp32")


def halves(model: nn.Module) -> None:
    whole = nn.Sequential(model, built(lambda: nn.Linear(3, 2), seed=4)).eval()
    model.norm.train()  # type: ignore[union-attr]
    HalvesProgram(
        model_fn=lambda: whole,
        bottom="0",
        top="1",
        example=(torch.ones(2, 4), torch.tensor([0, 1])),
    ).fingerprint()


def profiled(model: nn.Module) -> None:
    profile_module(model, SHAPE, "busy")


OF_SHAPE = (capture, capture_chain, capture_split, whole_front)
OTHERS = (profiled, measured, problem, halves, layered, int8)


def everything(model: nn.Module) -> list[Any]:
    """Return all that a module holds: names, identities, values and versions."""
    found: list[Any] = []
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            for name, one in value.items() if isinstance(value, dict) else [("", value)]:
                found.append((path, key, name, id(one)))
                if isinstance(one, torch.Tensor):
                    grad = one.grad if one.is_leaf else None
                    found.append((one.detach().tolist(), one._version, one.requires_grad, grad))
                if isinstance(one, list):
                    found.append(list(map(id, one)))
    return found


@pytest.mark.parametrize("memory", [False, True], ids=["no memory", "memory"])
@pytest.mark.parametrize("read", [*OF_SHAPE, *OTHERS])
def test_reading_leaves_the_model_and_the_generators_as_they_were(
    read: Callable[..., object], memory: bool
) -> None:
    model = built(lambda: Busy(memory=memory), seed=3)
    before, states = everything(model), generator_states()
    try:
        read(model, SHAPE) if read in OF_SHAPE else read(model)
    except ConfigError as error:
        assert "\n" not in str(error) and (memory or read is int8)
    assert everything(model) == before
    assert same_states(states, generator_states())


def test_constants_of_forward_belong_to_the_graph_and_so_to_any_copy_of_the_model() -> None:
    model, other = (built(Busy, seed=3) for _ in range(2))
    split = capture_split(model, SHAPE)
    for again in (model, other):
        assert split.fingerprint() == capture_split(again, SHAPE).fingerprint()
    chain = capture_chain(model, SHAPE)
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    with random_streams(0, 0):
        parts: Any = (inputs,)
        for piece in range(len(chain.pieces)):
            made = chain.module(other, piece, piece)(*parts)
            parts = made if isinstance(made, tuple) else (made,)
    with random_streams(0, 0):
        assert torch.equal(split.back(0)(split.front(0)(inputs)), parts[0])


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model.guard = threading.Lock()  # type: ignore[assignment]
    refused(lambda: copied(model), "Sequential", "TypeError: cannot pickle")
    refused(lambda: capture(model, SHAPE, name="mine"), "model mine", "copied")
    refused(lambda: profile_module(model, SHAPE, "mine"), "model mine", "copied")


def test_results_with_a_graph_are_copied_without_it() -> None:
    model = nn.utils.weight_norm(nn.Linear(3, 2))
    own = copied(model)
    assert own.weight.is_leaf and not model.weight.is_leaf
    assert own.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(own(torch.ones(1, 3)), model(torch.ones(1, 3)))
