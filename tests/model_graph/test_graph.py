"""A captured model is a value: it describes every copy, and capturing leaves nothing behind."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower.model_graph.cut_points import capture_split
from socflower.model_graph.graph import NUM_SAMPLES, CaptureFailed, capture
from tests.model_graph.small_models import Branching
from tests.one_line import one_line, refused


class Mixed(nn.Module):
    """Functions, a tied weight, a buffer read by name, random draws and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.norm(self.first(inputs)), 0.5, self.training) * self.scale
        return self.last(hidden.add_(1.0).relu())


def test_operations_say_who_makes_them_and_what_they_read_and_do() -> None:
    graph = capture(nn.Sequential(Mixed()), (4,))
    found = {
        one.node.name: (one.layer, one.function, one.draws, one.writes_in_place, one.is_constant)
        for one in graph.operations[1:-1]
    }
    assert found == {
        "_0_first": ("0.first", "", False, False, False),
        "_0_norm": ("0.norm", "", False, False, False),
        "dropout": ("0", "dropout", True, False, False),
        "_0_scale": ("0", "", False, False, True),
        "mul": ("0", "mul", False, False, False),
        "add_": ("0", "add", False, True, False),
        "relu": ("0", "relu", False, False, False),
        "_0_last": ("0.last", "", False, False, False),
    }
    tensors = {one.module: one.tensors for one in graph.operations if one.module}
    # Tied weights have one name.
    assert tensors["0.first"] & tensors["0.last"] == {"0.first.weight"}
    assert [one.shape for one in graph.operations if one.node.name == "mul"] == [(NUM_SAMPLES, 4)]
    assert [one.dtype for one in graph.operations if one.node.op == "placeholder"] == [
        torch.float32
    ]
    assert len(graph.evaluation) == len(graph.operations)


def test_modules_named_as_leaves_are_one_operation_and_may_compute_anything() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(Branching()), nn.Linear(6, 2))
    with pytest.raises(CaptureFailed) as caught:
        capture(model, (4,), name="m")
    one_line(str(caught.value), "model m", "Branching", "forward at small_models.py")
    assert caught.value.module == "1.0"
    operations = capture(model, (4,), leaves={"1"}).operations[1:-1]
    assert [one.module for one in operations] == ["0", "1", "2"]


def test_a_failure_restores_modes_buffers_and_the_random_state_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(5, 2)).eval()
    before, state = model.state_dict()["0.running_mean"].clone(), torch.get_rng_state()
    refused(lambda: capture(model, torch.ones(1, 4)), "(4,)")
    assert torch.equal(model.state_dict()["0.running_mean"], before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())


def test_a_copy_of_a_split_model_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    split = capture_split(nn.Sequential(*layers), (4,))
    monkeypatch.setattr("socflower.model_graph.cut_points.capture", None)
    other = split.copy()
    assert other.fingerprint() == split.fingerprint() == copy.deepcopy(split).fingerprint()
    assert other.random_layers == split.random_layers == {3: "2"}
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.zero_()
    found = [one.back(0)(one.front(0)(torch.ones(2, 4))).any() for one in (other, split)]
    assert found == [False, True]
