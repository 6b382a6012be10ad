"""Where models can be cut: everywhere that the brute force finds, nowhere else, and the halves make up the whole."""

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from socflower.edgecloud.split_program import cut_shapes
from socflower.model_graph.cut_points import SplitModel, capture_split, whole_back, whole_front
from socflower.model_graph.layer_profile import profile_module
from socflower.model_graph.random_state import forked_generator
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.models.language_models import bi_lstm
from tests.model_graph.small_models import Branching, Tied
from tests.one_line import refused
from tests.seeded import built

IMAGES = {
    "lenet5": (1, 28, 28),
    "vgg-small": (3, 32, 32),
    "resnet8": (3, 32, 32),
    "resnet18": (3, 16, 16),
    "mobilenet-v1": (3, 16, 16),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def split_of(name: str) -> tuple[nn.Module, SplitModel]:
    channels, size, _ = IMAGES[name]
    model = build_model(name, in_channels=channels, image_size=size, num_classes=10, seed=3)
    return model, capture_split(model, IMAGES[name], name=name)


class Block(nn.Module):
    """A residual block whose activation is a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(self.first(inputs)) + inputs)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", IMAGES)
def test_front_and_back_make_up_the_whole_and_share_its_weights(name: str) -> None:
    model, split = split_of(name)
    model.eval()
    inputs = torch.randn(2, *IMAGES[name], generator=torch.Generator().manual_seed(1))
    whole, state = model(inputs), model.state_dict(keep_vars=True)
    before: set[str] = set()
    for cut in range(0, split.num_cuts, 1 + split.num_cuts // 8):
        features = split.front(cut)(inputs)
        point = split.cuts[cut]
        assert tuple(features.shape[1:]) == point.feature_shape
        assert features[0].numel() == point.feature_elements
        assert torch.equal(split.back(cut)(features), whole)
        front, back = set(split.front_names(cut)), set(split.back_names(cut))
        assert not front & back and front | back == set(state) and before <= front
        for half, names in ((split.front(cut), front), (split.back(cut), back)):
            weights = half.state_dict(keep_vars=True)
            assert set(weights) == names
            assert all(weight is state[key] for key, weight in weights.items())
        before = front
    assert torch.equal(split.front(split.num_cuts)(inputs), whole)


def test_cuts_lie_after_activations_norms_and_pooling_outside_branches() -> None:
    names = {
        name: [point.name for point in split_of(name)[1].cuts] for name in ("lenet5", "resnet8")
    }
    assert names == {
        "lenet5": ["1", "2", "4", "5", "8", "10"],
        "resnet8": ["1", "2", "3.relu", "4.relu", "5.relu", "6"],
    }


@settings(max_examples=40)
@given(
    kinds=st.lists(
        st.sampled_from(["linear", "relu", "norm", "tanh", "pool", "dropout", "block"]),
        min_size=1,
        max_size=8,
    )
)
def test_a_chain_is_cut_after_each_activation_norm_or_pooling_with_weights_on_both_sides(
    kinds: Sequence[str],
) -> None:
    layers = {
        "linear": lambda: nn.Linear(4, 4),
        "relu": nn.ReLU,
        "norm": lambda: nn.BatchNorm1d(4),
        "tanh": nn.Tanh,
        "pool": lambda: nn.MaxPool1d(3, stride=1, padding=1),
        "dropout": nn.Dropout,
        "block": lambda: Block(4),
    }
    weighty = {"linear", "norm", "block"}
    expected = [
        place
        for place, kind in enumerate(kinds)
        if kind in {"relu", "norm", "tanh", "pool", "block"}
        and weighty & set(kinds[: place + 1])
        and weighty & set(kinds[place + 1 :])
    ]
    model = nn.Sequential(*(layers[kind]() for kind in kinds))
    if not expected:
        refused(lambda: capture_split(model, (4,)), "no place to cut")
        return
    split = capture_split(model, (4,))
    assert len(split.cuts) == len(expected)
    for point, place in zip(split.cuts, expected, strict=True):
        assert (
            point.name == str(place) if kinds[place] != "block" else point.name.startswith("relu")
        )


def test_a_bidirectional_lstm_is_cut_behind_each_layer_and_its_halves_are_the_whole() -> None:
    model = bi_lstm(vocabulary=50, seed=1)
    tokens = torch.arange(24).reshape(2, 12)
    split = capture_split(model, tokens)
    assert {point.name: point.feature_shape for point in split.cuts} == {
        "first": (12, 200),
        "second": (12, 100),
        "mean": (100,),
        "relu": (128,),
    }
    for cut in range(split.num_cuts):
        assert torch.equal(split.back(cut)(split.front(cut)(tokens)), model(tokens))


class Functional(nn.Module):
    """A network as people write it: functions for all that has no weights, a pooling without any name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.third, self.last = nn.Linear(8 * 4 * 4, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.max_pool2d(functional.relu(self.first(inputs)), 2)
        hidden = functional.adaptive_avg_pool2d(torch.relu(self.second(hidden)), 4)
        return self.last(
            functional.dropout(self.third(torch.flatten(hidden, 1)).relu(), training=self.training)
        )


class Inverted(nn.Module):
    """A residual block without an activation at its end, as MobileNet V2 and V3 have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.norm(self.first(inputs))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            Functional(),
            {
                "relu": (4, 12, 12),
                "max_pool2d": (4, 6, 6),
                "relu_1": (8, 6, 6),
                "adaptive_avg_pool2d": (8, 4, 4),
                "relu_2": (8,),
            },
        ),
        (
            nn.Sequential(
                nn.Conv2d(1, 2, 3), Inverted(2), Inverted(2), nn.Flatten(), nn.Linear(200, 3)
            ),
            {"add": (2, 10, 10), "add_1": (2, 10, 10)},
        ),
    ],
)
def test_functions_and_blocks_that_end_with_their_sum_are_cuts_too(
    model: nn.Module,
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    split = capture_split(model, (1, 12, 12))
    assert {point.name: point.feature_shape for point in split.cuts} == expected
    for cut in range(split.num_cuts):
        with forked_generator(0):
            # Dropout as a function draws.
            whole = split.front(split.num_cuts)(torch.ones(2, 1, 12, 12))
        with forked_generator(0):
            assert torch.equal(split.back(cut)(split.front(cut)(torch.ones(2, 1, 12, 12))), whole)


def test_a_layer_profile_knows_how_many_layers_a_front_half_has() -> None:
    model, split = split_of("resnet8")
    profile = profile_module(model, IMAGES["resnet8"], "resnet8")
    shapes = cut_shapes(split, profile)
    for shape, point in zip(shapes, split.cuts, strict=True):
        assert profile.layers[shape.num_layers - 1].name == point.name
        assert (
            sum(layer.weight_bytes for layer in profile.layers[: shape.num_layers])
            == point.front_trained_bytes
        )
        assert shape.feature_elements_per_sample == point.feature_elements
        # Batch statistics besides.
        assert shape.front_state_bytes > point.front_trained_bytes


class SizeFromInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        num = inputs.size(0)
        return self.last(torch.relu(self.first(inputs)).view(num, -1))


class Unpooling(nn.Module):
    """The places of maxima go with the features: there is no cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, places = functional.max_pool2d(self.first(inputs), 2, return_indices=True)
        return self.last(functional.max_unpool2d(torch.tanh(hidden), places, 2))


class HalfPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(inputs).to(torch.float16)).to(torch.float32))


class Forgotten(nn.Module):
    """Adds to a value that no operation returns anew: only the order of operations tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        hidden.add_(1.0)
        hidden = torch.relu(hidden)
        return self.last(hidden)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Tied(), (6,)),
        (SizeFromInput(), (1, 4, 4)),
        (HalfPrecision(), (4,)),
        (Unpooling(), (1, 8, 8)),
        (nn.Linear(3, 3), (3,)),
    ],
)
def test_tied_weights_second_values_and_other_types_forbid_a_cut(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    refused(lambda: capture_split(model, shape), "no place to cut")


def test_what_is_done_in_place_stays_on_its_side() -> None:
    model = Forgotten()
    split = capture_split(model, (4,))
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    assert (
        torch.equal(split.back(0)(split.front(0)(inputs)), model(inputs)) and split.writes_in_place
    )
    assert not capture_split(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (4,)
    ).writes_in_place


def test_a_shared_activation_is_cut_at_every_call() -> None:
    relu = nn.ReLU()
    split = capture_split(
        nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 4)), (4,)
    )
    assert [point.name for point in split.cuts] == ["1", "1@2"]


class TwoInputs(nn.Module):
    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return inputs * mask


@pytest.mark.parametrize(
    ("model", "example", "named"),
    [
        (TwoInputs(), (4,), "2 inputs"),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), (4,), "(4,)"),
        (nn.Linear(3, 3), torch.zeros(0, 3), "batch dimension"),
        (
            nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).requires_grad_(False),
            (3,),
            "trained",
        ),
        # With the place of what cannot be followed.
        (nn.Sequential(nn.Linear(6, 6), Branching()), (6,), "forward at small_models.py:"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    model: nn.Module, example: torch.Tensor | tuple[int, ...], named: str
) -> None:
    refused(lambda: capture_split(model, example, name="mine"), "mine", named)


def test_a_fingerprint_tells_graphs_settings_and_freezing_apart_but_not_values() -> None:
    def fingerprint(
        seed: int = 0, width: int = 4, slope: float = 0.1, frozen: int | None = None
    ) -> str:
        def chain() -> nn.Module:
            first = (nn.Linear(4, width), nn.LeakyReLU(slope))
            return nn.Sequential(*first, nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2))

        split = capture_split(built(chain, seed), (4,), frozen=frozen)
        assert split.copy().fingerprint() == split.fingerprint()
        return split.fingerprint()

    prints = {
        fingerprint(),
        fingerprint(width=5),
        fingerprint(slope=0.2),
        fingerprint(frozen=0),
        fingerprint(frozen=1),
    }
    assert len(prints) == 5 and fingerprint(seed=1) == fingerprint()


def test_freezing_by_cut_layer_or_block_is_the_same_where_they_end_together() -> None:
    by = [
        capture_split(split_of("resnet8")[0], IMAGES["resnet8"], frozen=frozen)
        for frozen in (2, "3.relu", "3")
    ]
    assert len({split.fingerprint() for split in by}) == 1
    split = by[0]
    assert [point.front_trains for point in split.cuts] == [False, False, False, True, True, True]
    split.set_training_mode()
    modes = {
        path: module.training
        for path, module in split.model.named_modules()
        if not isinstance(module, nn.Sequential) and not list(module.children())
    }
    assert (
        not any(mode for path, mode in modes.items() if path[0] in "0123")
        and modes["4.relu"]
        and modes["8"]
    )
    assert all(
        weight.requires_grad == (name[0] not in "0123")
        for name, weight in split.model.named_parameters()
    )


@pytest.mark.parametrize(
    ("frozen", "named"), [(9, "frozen = 9"), ("nine", "'nine'"), ("11", "trained")]
)
def test_what_cannot_be_frozen_is_refused(frozen: int | str, named: str) -> None:
    model = split_of("lenet5")[0]
    refused(lambda: capture_split(model, IMAGES["lenet5"], frozen=frozen), named)
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_cut_that_is_not_there_is_refused() -> None:
    split = split_of("lenet5")[1]
    assert split.cut_named("8") == 4
    refused(lambda: split.front(7), "cut = 7", "0 to 5")
    refused(lambda: split.back(6), "6")
    refused(lambda: split.back(-1), "cut = -1")
    refused(lambda: split.cut_named("7"), "'7'", "1, 2, 4, 5, 8, 10")


def test_a_whole_model_is_a_half_with_one_cut_at_its_end() -> None:
    bottom, top = nn.Sequential(nn.Linear(4, 6), Branching()), nn.Linear(6, 2)
    front, back = whole_front(bottom, (4,), name="bottom"), whole_back(top, name="top")
    assert front.cuts[0].feature_shape == (6,)
    assert front.front_names(0) == tuple(bottom.state_dict()) and not front.back_names(0)
    assert front.front(0) is bottom and back.back(0) is top and not back.front_names(0)
    assert front.copy().fingerprint() == front.fingerprint() != back.fingerprint()
    refused(lambda: back.samples(1), "example")
    flat = nn.Sequential(nn.Linear(3, 3), nn.Flatten(0))
    refused(lambda: whole_front(flat, (4, 3), name="flat"), "model flat", "float32")


def test_a_layer_that_its_maker_keeps_in_evaluation_mode_has_to_be_frozen() -> None:
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    kept = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
    first.eval()
    refused(lambda: capture_split(kept, (1, 6, 6)), "'0'", "evaluation mode")
    refused(lambda: whole_front(kept, (1, 6, 6)), "'0'", "evaluation mode")
    split = capture_split(kept, (1, 6, 6), frozen="0")
    assert split.copy().frozen_layers == split.frozen_layers
    # Libraries hand out pretrained models in evaluation mode; such a model trains as a whole.
    capture_split(kept.eval(), (1, 6, 6))
