"""Pieces of a chain make up the model: bit for bit in results and gradients, and exactly in costs."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from socflower.model_graph.chain import ModelChain, capture_chain
from socflower.model_graph.graph import NUM_SAMPLES, NoParts
from socflower.model_graph.layer_profile import profile_module, profile_operations
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.language_models import bert_small, gpt_small
from tests.model_graph.small_models import Branching
from tests.one_line import refused
from tests.seeded import built

IMAGES = {"lenet5": (1, 28, 28), "resnet8": (3, 8, 8), "efficientnet-b1": (3, 16, 16)}
NAMES = [
    # The 23 blocks of efficientnet-b1 take as long as all others together; resnet8 branches too.
    pytest.param(name, marks=pytest.mark.slow if name == "efficientnet-b1" else ())
    for name in (*IMAGES, "bert-small", "gpt-small")
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_and_example(name: str) -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name in IMAGES:
        channels, size, _ = IMAGES[name]
        model = build_model(name, in_channels=channels, image_size=size, num_classes=10, seed=3)
        return model, torch.randn(4, *IMAGES[name], generator=generator)
    tokens = torch.randint(0, 40, (2, 8), generator=generator)
    if name == "bert-small":
        return bert_small(length=8, num_classes=3, vocabulary=40, dropout=0.0, seed=3), tokens
    return gpt_small(length=8, vocabulary=40, width=64, num_blocks=2, seed=3), tokens


def run(
    chain: ModelChain, model: nn.Module, inputs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the output and the gradients of the weights when each piece runs alone, as on a device of its own."""
    entering: tuple[torch.Tensor, ...] = (inputs,)
    steps = []
    for number in range(len(chain.pieces)):
        leaves = tuple(
            tensor.detach().clone().requires_grad_(tensor.is_floating_point())
            for tensor in entering
        )
        entering = as_tuple(chain.module(model, number, number)(*leaves))
        steps.append((leaves, entering))
    output = entering[0]
    gradients: list[torch.Tensor | None] = [torch.ones_like(output)]
    for leaves, results in reversed(steps):
        pairs = [
            pair
            for pair in zip(results, gradients, strict=True)
            if pair[0].requires_grad and pair[1] is not None
        ]
        # A piece may make a mask only.
        if pairs:
            torch.autograd.backward(*(list(each) for each in zip(*pairs, strict=True)))
        gradients = [leaf.grad for leaf in leaves]
    return output, gradients_of(model)


def as_tuple(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = model.named_parameters()
    return {key: weight.grad.clone() for key, weight in weights if weight.grad is not None}


def forward(chain: ModelChain, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    parts: tuple[torch.Tensor, ...] = (inputs,)
    for number in range(len(chain.pieces)):
        parts = as_tuple(chain.module(model, number, number)(*parts))
    return parts[0]


def copied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", NAMES)
def test_pieces_one_after_another_equal_the_model_and_its_gradients_bit_for_bit(name: str) -> None:
    model, inputs = model_and_example(name)
    state = copied_state(model)
    for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.0
    output = model(inputs)
    output.backward(torch.ones_like(output))
    whole, statistics = gradients_of(model), copied_state(model)
    model.load_state_dict(state)
    model.zero_grad()
    piecewise, gradients = run(capture_chain(model, inputs, name=name), model, inputs)
    assert torch.equal(piecewise, output)
    assert gradients.keys() == whole.keys()
    assert all(torch.equal(gradients[key], whole[key]) for key in whole)
    # Those of BatchNorm too.
    assert all(torch.equal(value, statistics[key]) for key, value in model.state_dict().items())


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", NAMES)
def test_costs_of_operations_add_up_to_the_whole_profile(name: str) -> None:
    model, inputs = model_and_example(name)
    chain = capture_chain(model, inputs, name=name)
    profile = profile_module(model, inputs[[0] * NUM_SAMPLES], name)
    costs = profile_operations(model, chain.graph, inputs)
    in_pieces = [costs[operation] for piece in chain.pieces for operation in piece.operations]
    forward_flops = sum(cost.forward_flops for cost in in_pieces)
    backward_flops = sum(cost.backward_flops for cost in in_pieces)
    made = sum(cost.output_bytes for cost in in_pieces if cost.in_backward)
    assert (forward_flops, forward_flops + backward_flops, made) == pytest.approx(
        (
            profile.forward_flops,
            profile.training_flops,
            profile.activation_bytes - profile.input_bytes,
        ),
        rel=1e-12,
    )
    used = [
        tensor
        for piece in chain.pieces
        for tensor in {key for operation in piece.operations for key in operation.tensors}
    ]
    # No two pieces use the same tensor.
    assert len(used) == len(set(used))
    weights = dict(model.named_parameters())
    assert sum(4 * weights[key].numel() for key in used if key in weights) == profile.weight_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_crosses_a_cut_is_exactly_what_the_rest_reads(name: str) -> None:
    model, inputs = model_and_example(name)
    chain = capture_chain(model, inputs, name=name)
    assert chain.pieces[0].entering == () == chain.pieces[-1].leaving
    for number, (before, after) in enumerate(pairwise(chain.pieces)):
        assert before.leaving == after.entering and before.output_bytes > 0
        front = {
            one
            for piece in chain.pieces[: number + 1]
            for one in piece.operations
            if not one.is_constant
        }
        back = {one for piece in chain.pieces[number + 1 :] for one in piece.operations}
        assert set(before.leaving) == {
            one for one in front if not back.isdisjoint(chain.graph.readers[one])
        }
    running = [one for piece in chain.pieces for one in piece.operations if not one.is_constant]
    assert running == [one for one in chain.graph.operations if not one.is_constant]


def test_a_cut_inside_a_residual_block_carries_the_shortcut_too() -> None:
    model, inputs = model_and_example("resnet8")
    chain = capture_chain(model, inputs)
    counts = {piece.name: len(piece.leaving) for piece in chain.pieces}
    assert counts["3.residual.0"] == 2 and counts["2"] == 1


def test_a_module_that_fx_cannot_follow_is_one_piece() -> None:
    model = built(
        lambda: nn.Sequential(Branching(), nn.ReLU(), nn.Linear(6, 6), Branching()), seed=1
    )
    chain = capture_chain(model, (6,))
    assert chain.names == ("0", "1", "2", "3")
    for number in (0, 3):
        used = {key for one in chain.pieces[number].operations for key in one.tensors}
        assert used == {f"{number}.linear.weight", f"{number}.linear.bias"}
    inputs = torch.randn(4, 6)
    assert torch.equal(forward(chain, model, inputs), model(inputs))


@settings(max_examples=6)
@given(data=st.data())
def test_joined_pieces_compute_the_same(data: st.DataObject) -> None:
    model, inputs = model_and_example("resnet8")
    model.eval()
    fine = capture_chain(model, inputs)
    last = len(fine.pieces) - 1
    ends = sorted(data.draw(st.sets(st.integers(0, last - 1), min_size=1, max_size=5)))
    chain = fine.merged(ends)
    assert len(chain.pieces) == len(ends) + 1
    assert torch.equal(forward(chain, model, inputs), model(inputs))
    assert [piece.output_bytes for piece in chain.pieces[:-1]] == [
        fine.pieces[end].output_bytes for end in ends
    ]


def test_a_coarse_chain_has_one_product_a_piece_and_cuts_where_least_crosses() -> None:
    model, inputs = model_and_example("lenet5")
    fine = capture_chain(model, inputs)
    costs = profile_operations(model, fine.graph, inputs)
    coarse = fine.coarsened(lambda operation: costs[operation].forward_flops > 0)
    assert coarse.names == ("0", "3", "7", "9", "11")
    # Behind pooling.
    assert [piece.leaving[0].node.name for piece in coarse.pieces[:-1]] == [
        "_2",
        "_6",
        "_8",
        "_10",
    ]
    for piece in coarse.pieces:
        assert sum(costs[operation].forward_flops > 0 for operation in piece.operations) == 1


class Overwriting(nn.Module):
    """Overwrites a view of what its first layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.flatten = nn.Flatten()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.flatten(self.norm(self.first(inputs))), inplace=True))


def test_no_cut_separates_a_tensor_from_what_overwrites_it() -> None:
    model = built(Overwriting, seed=1)
    chain = capture_chain(model, (4,))
    assert [piece.leaving[0].node.name for piece in chain.pieces[:-1]] == ["first", "relu"]
    output, gradients = run(chain, model, torch.ones(3, 4))
    assert torch.equal(output, model(torch.ones(3, 4))) and len(gradients) == 6


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    for model, named in ((nn.Linear(6, 2), "single operation"), (Branching(), "Branching")):
        refused(lambda model=model: capture_chain(model, (6,), name="whole"), named, error=NoParts)
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    chain = capture_chain(two, (4,), name="two")
    refused(lambda: chain.module(two, 1, 2), "0 to 1", "1 to 2")
    refused(lambda: chain.merged([1]), "rise")
