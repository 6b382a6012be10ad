"""What of a model travels, and how nodes know that they have the same rest."""

import copy
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from socflower.training.model_state import frozen_digest, load_trainable_state, trainable_state
from tests.one_line import refused
from tests.seeded import built

NAMES = [f"{layer}.{part}" for layer in range(3) for part in ("weight", "bias")]


def network(frozen: AbstractSet[str] = frozenset(), seed: int = 1) -> nn.Module:
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@given(st.sets(st.sampled_from(NAMES)))
def test_trainable_parameters_and_buffers_travel_and_frozen_ones_stay(frozen: set[str]) -> None:
    sender = network(frozen)
    receiver = network(frozen, seed=2)
    before = copies(receiver.state_dict())
    sent = trainable_state(sender)
    assert set(sent) == set(sender.state_dict()) - frozen
    load_trainable_state(receiver, sent)
    for name, tensor in receiver.state_dict().items():
        assert torch.equal(tensor, before[name] if name in frozen else sent[name]), name


def test_a_model_without_frozen_parameters_has_its_whole_state_and_no_digest() -> None:
    assert list(trainable_state(network())) == list(network().state_dict())
    assert frozen_digest(network()) == ""


@given(st.sets(st.sampled_from(NAMES), min_size=1), st.data())
def test_any_bit_and_any_name_changes_the_digest(frozen: set[str], data: st.DataObject) -> None:
    one = network(frozen)
    other = network(frozen)
    assert frozen_digest(one) == frozen_digest(other) != ""
    parameter = dict(other.named_parameters())[
        data.draw(st.sampled_from(sorted(frozen)))
    ].data.view(-1)
    parameter[data.draw(st.integers(0, len(parameter) - 1))] += 1.0
    assert frozen_digest(one) != frozen_digest(other)
    assert frozen_digest(one) != frozen_digest(network(frozen ^ {NAMES[0]}))


def test_trained_values_and_buffers_are_not_in_the_digest() -> None:
    model = network({NAMES[0]})
    before = frozen_digest(model)
    with torch.no_grad():
        model[2].weight.add_(1.0)
        model[1].running_mean.add_(1.0)
    assert frozen_digest(model) == before


def test_the_digest_reads_bfloat16_and_tensors_without_dimensions() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    model = built(Scaled, 1).to(torch.bfloat16)
    digest = frozen_digest(model)
    model.scale.data += 1.0
    assert frozen_digest(model) != digest


def test_tied_weights_travel_under_both_names() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
    model["out"].weight = model["in"].weight
    other = copy.deepcopy(model)
    with torch.no_grad():
        model["in"].weight.add_(1.0)
    load_trainable_state(other, trainable_state(model))
    assert (
        torch.equal(other["out"].weight, model["in"].weight)
        and other["out"].weight is other["in"].weight
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"other": torch.zeros(1)}, ("Sequential", "'other'")),
        ({"2.bias": torch.zeros(3)}, ("'2.bias'", "(2,)", "(3,)")),
        ({"1.running_var": None}, ("'1.running_var'",)),
        ({"2.weight": None}, ("'2.weight'",)),
    ],
)
def test_the_state_of_another_model_is_refused_and_changes_nothing(
    changes: dict[str, Tensor | None], named: tuple[str, ...]
) -> None:
    model = network({NAMES[0]})
    before = copies(model.state_dict())
    sent = trainable_state(network({NAMES[0]}, seed=2)) | changes
    sent = {name: tensor for name, tensor in sent.items() if tensor is not None}
    refused(lambda: load_trainable_state(model, sent), *named)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0.0, atol=0.0)
