"""What int8 training cannot do is refused before a step, with advice that works where it is given."""

import copy
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.run_app import run_app
from socflower.errors import TrainingFailed
from socflower.model_graph.random_state import forked_generator
from socflower.precision import ADAPTIVE_FIXED_POINT, NITI, Int8Model, NativeInt8Backend
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import Trainer
from socflower.workloads.dataset import LabelledData
from tests.one_line import refused
from tests.training.by_torch import trained

IMAGE = (3, 10, 10)
NAMES = {
    each.__name__: each
    for each in (Int8Trainer, MixedPrecisionTrainer, partial, NativeInt8Backend, FP32Trainer)
}
MIXED = partial(MixedPrecisionTrainer, rule="half", parallel=False)
STRICT_MIXED = partial(MIXED, backend=partial(NativeInt8Backend, unsupported="refuse"))
BOTH = pytest.mark.parametrize(
    "trainer", [partial(Int8Trainer, unsupported="refuse"), STRICT_MIXED], ids=["int8", "mixed"]
)


class Squash(nn.Module):
    """A user's module: a function that int8 has not, after a layer that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(8, 8, 1), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.conv(x)) * self.scale


class Follows(nn.Module):
    """A user's module of a function of (layer, x)."""

    def __init__(self, layer: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


class Tied(nn.Module):
    """A user's module of two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 1, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "module": nn.Tanhshrink,
    "module with parameters": lambda: nn.PReLU(8),
    "setting": lambda: nn.MaxPool2d(2, dilation=2),
    "a module of the user": Squash,
    "a module inside one": lambda: nn.Sequential(Squash(), nn.Sequential(nn.ReLU(), Squash())),
    "a module of two inputs": lambda: Follows(nn.Bilinear(10, 10, 10), lambda mix, x: mix(x, x)),
    "a module of four dimensions": lambda: Follows(
        nn.Conv3d(1, 1, 1), lambda mix, x: mix(x.unsqueeze(1)).squeeze(1)
    ),
    "a module that torch.fx cannot follow": lambda: Follows(
        nn.Conv2d(8, 8, 1), lambda conv, x: conv(x) if float(x.detach().abs().sum()) > 1.0 else x
    ),
    "a module that differs in evaluation": lambda: Follows(
        nn.ReLU(), lambda relu, x: relu(x) if relu.training else x
    ),
    "tied weights in a module": Tied,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)),
    "spectral_norm of old": lambda: nn.utils.spectral_norm(nn.Conv2d(8, 8, 1)),
}


def network(odd: nn.Module) -> nn.Module:
    """Return a network of the user's own with `odd` in the middle."""
    with forked_generator(3):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), odd, nn.Flatten(), nn.LazyLinear(4)
        )
        model.eval()(torch.zeros(1, *IMAGE))
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, *IMAGE, generator=generator), torch.arange(6) % 4


def train(trainer: Trainer, model: nn.Module) -> None:
    trained(trainer, model, [[batch()]] * 2)


@pytest.mark.few_cells(6)
@pytest.mark.parametrize("name", OPERATORS)
@BOTH
def test_each_line_of_code_that_a_trainer_advises_trains_the_network(
    trainer: Callable[..., Trainer], name: str
) -> None:
    """The text is taken at its word: what it says to use is evaluated as it stands."""
    model = network(OPERATORS[name]())
    before = copy.deepcopy(model.state_dict())
    text = refused(lambda: train(trainer(), model))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0.0, atol=0.0)
    made = getattr(trainer, "func", trainer).__name__
    advised = re.findall(rf"{made}\((?:[^()]|\([^()]*\))*\)", text)
    assert len(advised) == 2, text
    for code in advised:
        assert "fp32" in code
        train(eval(code, NAMES), network(OPERATORS[name]()))
    if "norm" in name:
        assert text.startswith("2: ") and "computed from other parameters" in text


@pytest.mark.parametrize("name", ["setting", "a module inside one"])
def test_what_from_module_advises_can_be_said_to_it(name: str) -> None:
    model = network(OPERATORS[name]())
    text = refused(lambda: Int8Model.from_module(model, input_shape=IMAGE, unsupported="refuse"))
    advised = re.findall(r"(fp32_operators|unsupported)=(\[.*?\]|'fp32')", text)
    assert [key for key, _ in advised] == ["unsupported", "fp32_operators"], text
    for key, value in advised:
        made = Int8Model.from_module(model, input_shape=IMAGE, **{key: eval(value)})
        assert any(node.kind == "fp32" for node in made.graph.nodes)


class InItsOwnForward(nn.Module):
    """A network that does what int8 has not in its own `forward`, not in a module."""

    def __init__(self, squash: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(800, 4)
        self.squash = squash

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.squash(self.conv(x)).flatten(1))


@BOTH
def test_what_the_network_itself_does_runs_in_fp32_too(trainer: Callable[..., Trainer]) -> None:
    own = InItsOwnForward(torch.erf)
    text = refused(lambda: train(trainer(), own), "erf")
    (code,) = re.findall(r"(?:Int8|MixedPrecision)Trainer\((?:[^()]|\([^()]*\))*\)", text)
    assert "cannot" not in text and "fp32_operators" not in text
    train(eval(code, NAMES), own)
    train(eval(code, NAMES), InItsOwnForward(Squash()))


def tied_network(*, together: bool) -> nn.Module:
    """Return a network with a weight in two places: in its own layers, or in those of a module."""
    with forked_generator(3):
        second = nn.Conv2d(8, 8, 1, bias=False)
        layers = [nn.Conv2d(3, 8, 3, padding=1), Tied(), nn.ReLU(), second]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 4))
    if not together:
        model[1].second = nn.Identity()
        second.weight = model[1].first.weight
    return model


@pytest.mark.parametrize(
    ("trainer", "following"),
    [
        (Int8Trainer(), Int8Trainer()),
        (MIXED(), MIXED(backend=NativeInt8Backend)),
        (
            MIXED(),
            MIXED(
                fp32=FP32Trainer(optimizer=sgd(0.01, momentum=0.0)),
                backend=partial(NativeInt8Backend, NITI),
            ),
        ),
    ],
)
def test_weights_tied_across_a_network_are_refused_and_tied_in_a_module_train_as_one(
    trainer: Trainer, following: Trainer
) -> None:
    refused(
        lambda: train(trainer, tied_network(together=False)),
        "1.first.weight and 3.weight are one parameter",
        "FP32Trainer",
        "a module of its own",
    )
    train(FP32Trainer(), tied_network(together=False))
    model = tied_network(together=True)
    before = model[1].first.weight.detach().clone()
    train(following, model)
    state = model.state_dict()
    assert torch.equal(state["1.first.weight"], state["1.second.weight"])
    assert not torch.equal(state["1.first.weight"], before)


def test_weights_that_share_memory_alone_are_refused_as_well() -> None:
    tied = Tied()
    tied.second.weight = nn.Parameter(tied.first.weight.detach())
    strict = Int8Trainer(unsupported="refuse")
    refused(lambda: train(strict, network(tied)), "2.first.weight and 2.second.weight")


def test_tied_weights_in_fp32_are_both_moved_by_both_gradients() -> None:
    """Without an optimiser of its own, a module's step is plain SGD, which autograd gives as well."""
    model = nn.Sequential(Tied(), nn.Flatten(), nn.Linear(800, 4))
    int8 = Int8Model.from_module(model, input_shape=(8, 10, 10), fp32_operators=["0"])
    images = torch.randn(6, 8, 10, 10, generator=torch.Generator().manual_seed(4)).numpy()
    for _ in range(3):
        int8.train_step(images, batch()[1].numpy(), learning_rate=0.1, progress=0.0)
        state = int8.state_dict()
        assert torch.equal(state["0.first.weight"], state["0.second.weight"])
    assert not torch.equal(state["0.first.weight"], model[0].first.weight)


def on_rows(trainer: Trainer) -> None:
    """Train on inputs that are no images."""
    trained(trainer, nn.Linear(3, 2), [[(torch.zeros(4, 3), torch.zeros(4).long())]])


def twice(layer: nn.Module) -> nn.Module:
    return network(Follows(layer, lambda inner, x: inner(torch.relu(inner(x)))))


REMEDIES: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "masters in a backend": (
        lambda: NativeInt8Backend(ADAPTIVE_FIXED_POINT),
        "niti",
        lambda: (NativeInt8Backend(NITI), NativeInt8Backend()),
    ),
    "no images, int8": (
        lambda: on_rows(Int8Trainer()),
        "FP32Trainer",
        lambda: on_rows(FP32Trainer()),
    ),
    "no images, mixed": (
        lambda: on_rows(MIXED()),
        "FP32Trainer",
        lambda: on_rows(FP32Trainer()),
    ),
    "held-out inputs of another shape": (
        lambda: train(MIXED(held_out=torch.zeros(3, 1, 10, 10)), network(nn.ReLU())),
        "held_out",
        lambda: train(MIXED(held_out=batch()[0]), network(nn.ReLU())),
    ),
    "another loss": (
        lambda: MIXED(fp32=FP32Trainer(loss=nn.functional.nll_loss)),
        "loss",
        lambda: MIXED(fp32=FP32Trainer(optimizer=sgd(0.1))),
    ),
    "a layer that is called twice": (
        lambda: train(Int8Trainer(), twice(nn.Conv2d(8, 8, 1))),
        "a module for each call",
        lambda: train(Int8Trainer(), network(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()))),
    ),
    "an FP32 layer that is called twice": (
        lambda: train(Int8Trainer(), twice(nn.PReLU(8))),
        "a module for each",
        lambda: train(Int8Trainer(), twice(nn.Tanhshrink())),
    ),
    "a layer that is called twice, in a module": (
        lambda: train(Int8Trainer(), twice(nn.Conv2d(8, 8, 1))),
        "fp32_operators",
        lambda: train(Int8Trainer(fp32_operators=["2"]), twice(nn.Conv2d(8, 8, 1))),
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_who_follows_another_refusals_advice_gets_on(name: str) -> None:
    mistake, advice, remedy = REMEDIES[name]
    refused(mistake, advice)
    remedy()


@BOTH
def test_a_flower_run_of_such_a_network_ends_with_the_refusal_and_trains_nothing(
    trainer: Callable[..., Trainer],
) -> None:
    """Under Flower's FedAvg, which leaves out clients that fail and would keep the first weights for all rounds."""

    def data(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
        return LabelledData(*batch(), mean=(0.0,) * 3, std=(1.0,) * 3, num_classes=4)

    client = make_client_app(lambda context: network(nn.Tanhshrink()), data, trainer())
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        FedAvg().start(grid, ArrayRecord(network(nn.Tanhshrink()).state_dict()), num_rounds=2)

    cluster = parse_cluster({"boards": [2]})
    refused(
        lambda: run_app(server, client, cluster=cluster, num_workers=0),
        "2: int8 training has no Tanhshrink",
        "'fp32'",
        error=TrainingFailed,
    )
