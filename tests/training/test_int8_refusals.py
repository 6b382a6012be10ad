"""What int8 training cannot do is refused before a step, with advice that works where it is given."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from socflower.clients.app import make_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.run_app import run_app
from socflower.errors import ConfigError, TrainingFailed
from socflower.model_graph.random_state import forked_generator
from socflower.precision import ADAPTIVE_FIXED_POINT, Int8Model, NativeInt8Backend, int8_algorithm
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import Trainer, TrainingSpan
from socflower.workloads import LabelledData

IMAGE = (3, 10, 10)
NAMES = {
    "Int8Trainer": Int8Trainer,
    "MixedPrecisionTrainer": MixedPrecisionTrainer,
    "partial": partial,
    "NativeInt8Backend": NativeInt8Backend,
    "FP32Trainer": FP32Trainer,
}


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """These networks are too small to share out, and idle threads spin on the others' cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Squash(nn.Module):
    """A user's module: a function that int8 has not, after a layer that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(8, 8, 1), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(x)) * self.scale


class Branching(nn.Module):
    """A user's module that torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if float(x.detach().abs().sum()) > 1.0 else x


class SkipsInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) if self.training else x


class TwoInputs(nn.Module):
    """A user's module around one of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(10, 10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x)


class Flat(nn.Module):
    """A user's module around one that flattens to three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.mix = nn.Flatten(2), nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.flat(x)).reshape(-1, 8, 10, 10)


class Tied(nn.Module):
    """A user's module of two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = (
            nn.Conv2d(8, 8, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1, bias=False),
        )
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))


def tied_by_memory() -> nn.Module:
    tied = Tied()
    tied.second.weight = nn.Parameter(tied.first.weight.detach())
    return tied


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "module": nn.GELU,
    "module with parameters": lambda: nn.GroupNorm(2, 8),
    "setting": lambda: nn.Conv2d(8, 8, 3, padding="same"),
    "dropout of another kind": lambda: nn.AlphaDropout(0.2),
    "pool": lambda: nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False),
    "a module of the user": Squash,
    "a module inside one": lambda: nn.Sequential(Squash(), nn.Sequential(nn.ReLU(), Squash())),
    "a module of two inputs": TwoInputs,
    "a module of three dimensions": Flat,
    "a module that torch.fx cannot follow": Branching,
    "a module that differs in evaluation": SkipsInEvaluation,
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
    return torch.randn(6, *IMAGE, generator=generator), torch.randint(
        0, 4, (6,), generator=generator
    )


def train(trainer: Trainer, model: nn.Module) -> None:
    session = trainer.start(model, TrainingSpan())
    for _ in range(2):
        assert torch.isfinite(session.step([batch()]))
    assert not session.finish().events


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "trainer", [Int8Trainer(), MixedPrecisionTrainer(rule="half", parallel=False)]
)
def test_each_line_of_code_that_a_trainer_advises_trains_the_network(
    trainer: Trainer, name: str
) -> None:
    """The text is taken at its word: what it says to use is evaluated as it stands, again until it trains."""
    model = network(OPERATORS[name]())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    text = refused(lambda: train(trainer, model))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was trained although the network is refused"
    advised = re.findall(rf"{type(trainer).__name__}\((?:[^()]|\([^()]*\))*\)", text)
    assert len(advised) == 2, text
    for code in advised:
        assert "fp32" in code
        train(eval(code, NAMES), network(OPERATORS[name]()))


@pytest.mark.parametrize("name", OPERATORS)
def test_what_from_module_advises_can_be_said_to_it(name: str) -> None:
    text = refused(lambda: Int8Model.from_module(network(OPERATORS[name]()), input_shape=IMAGE))
    advised = re.findall(r"(fp32_operators|unsupported)=(\[.*?\]|'fp32')", text)
    assert [key for key, _ in advised] == ["unsupported", "fp32_operators"], text
    for key, value in advised:
        settings: dict[str, Any] = {key: eval(value)}
        model = Int8Model.from_module(network(OPERATORS[name]()), input_shape=IMAGE, **settings)
        assert any(node.kind == "fp32" for node in model.graph.nodes)


class InItsOwnForward(nn.Module):
    """A network that does what int8 has not in its own `forward`, not in a module."""

    def __init__(self, moved: bool) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(800, 4)
        self.squash = Squash() if moved else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head((torch.sigmoid(x) if self.squash is None else self.squash(x)).flatten(1))


@pytest.mark.parametrize(
    "trainer", [Int8Trainer, partial(MixedPrecisionTrainer, rule="half", parallel=False)]
)
def test_what_the_network_itself_does_is_to_be_moved_into_a_module_and_then_trains(
    trainer: Callable[..., Any],
) -> None:
    text = refused(lambda: train(trainer(), InItsOwnForward(moved=False)))
    assert (
        "sigmoid: int8 training has no operator 'sigmoid'; move it into a module of its own" in text
    )
    code = re.findall(r"(?:Int8|MixedPrecision)Trainer\(.*\)", text)[0]
    assert "cannot" not in text and "fp32_operators" not in text
    refused(lambda: train(eval(code, NAMES), InItsOwnForward(moved=False)))
    train(eval(code, NAMES), InItsOwnForward(moved=True))


def tied_network(*, together: bool) -> nn.Module:
    """Return a network with a weight in two places: in its own layers, or in those of a module."""
    with forked_generator(3):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            Tied(),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1, bias=False),
            nn.Flatten(),
            nn.Linear(800, 4),
        )
        if not together:
            model[1].second = nn.Identity()
            model[3].weight = model[1].first.weight
    return model


@pytest.mark.parametrize(
    "trainer",
    [
        Int8Trainer,
        partial(MixedPrecisionTrainer, rule="half", parallel=False),
        partial(
            MixedPrecisionTrainer,
            rule="half",
            parallel=False,
            fp32=FP32Trainer(optimizer=sgd(0.01, momentum=0.0)),
            backend=partial(NativeInt8Backend, int8_algorithm("niti")),
        ),
    ],
)
def test_weights_tied_across_a_network_are_refused_and_tied_in_a_module_train_as_one(
        trainer: Callable[..., Any]) -> None:  # fmt: skip
    text = refused(lambda: train(trainer(), tied_network(together=False)))
    assert text.startswith(
        "1.first.weight and 3.weight are one parameter, and int8 training has no operators that sh"
    )
    assert (
        "train with FP32Trainer" in text
        and "move it into a module of its own, of one tensor in and one out" in text
    )
    train(FP32Trainer(), tied_network(together=False))

    if isinstance(trainer, partial):
        backend = trainer.keywords.get("backend", NativeInt8Backend)
        following = partial(trainer, backend=partial(backend, unsupported="fp32"))
    else:
        following = partial(trainer, unsupported="fp32")
    model = tied_network(together=True)
    before = model[1].first.weight.detach().clone()
    train(following(), model)
    state = model.state_dict()
    assert torch.equal(state["1.first.weight"], state["1.second.weight"])
    assert not torch.equal(state["1.first.weight"], before)


def test_weights_that_share_memory_alone_are_refused_as_well() -> None:
    text = refused(lambda: train(Int8Trainer(), network(tied_by_memory())))
    assert "2.first.weight and 2.second.weight are one parameter" in text


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


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm of old"])
def test_a_parametrised_layer_is_named_with_what_makes_it_one(name: str) -> None:
    for trainer in (Int8Trainer(), MixedPrecisionTrainer(rule="half", parallel=False)):
        text = refused(lambda trainer=trainer: train(trainer, network(OPERATORS[name]())))  # type: ignore[misc]
        assert text.startswith("2: int8 training has no ")
        assert (
            "whose weight is computed from other parameters, as weight_norm and other parametrisations"
            in text
        )


def on_rows(trainer: Trainer) -> None:
    """Train on inputs that are no images."""
    trainer.start(nn.Linear(3, 2), TrainingSpan()).step(
        [(torch.zeros(4, 3), torch.zeros(4).long())]
    )


REMEDIES: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "momentum of niti": (
        lambda: int8_algorithm("niti", momentum=0.9),
        "use momentum 0, or adaptive-fixed-point",
        lambda: (
            int8_algorithm("niti", momentum=0.0),
            int8_algorithm("adaptive-fixed-point", momentum=0.9),
        ),
    ),
    "bits of adaptive fixed point": (
        lambda: int8_algorithm("adaptive-fixed-point", gradient_bits=(2, 1, 0)),
        "leave gradient_bits out, or use niti",
        lambda: (
            int8_algorithm("adaptive-fixed-point"),
            int8_algorithm("niti", gradient_bits=(2, 1, 0)),
        ),
    ),
    "masters in a backend": (
        lambda: NativeInt8Backend(ADAPTIVE_FIXED_POINT),
        "use niti or the default",
        lambda: (NativeInt8Backend(int8_algorithm("niti")), NativeInt8Backend()),
    ),
    "no images, int8": (
        lambda: on_rows(Int8Trainer()),
        "use FP32Trainer",
        lambda: on_rows(FP32Trainer()),
    ),
    "no images, mixed": (
        lambda: on_rows(MixedPrecisionTrainer(parallel=False)),
        "use FP32Trainer",
        lambda: on_rows(FP32Trainer()),
    ),
    "held-out inputs of another shape": (
        lambda: train(
            MixedPrecisionTrainer(rule="half", parallel=False, held_out=torch.zeros(3, 1, 10, 10)),
            network(nn.ReLU()),
        ),
        "hold out samples of the same data",
        lambda: train(
            MixedPrecisionTrainer(rule="half", parallel=False, held_out=batch()[0]),
            network(nn.ReLU()),
        ),
    ),
    "another loss": (
        lambda: MixedPrecisionTrainer(fp32=FP32Trainer(loss=nn.functional.nll_loss)),
        "leave the loss and the loss_w",
        lambda: MixedPrecisionTrainer(fp32=FP32Trainer(optimizer=sgd(0.1))),
    ),
    "a layer that is called twice": (
        lambda: train(Int8Trainer(), network(Shared(nn.Conv2d(8, 8, 1)))),
        "make a module for each call",
        lambda: train(
            Int8Trainer(), network(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)))
        ),
    ),
    "an FP32 layer that is called twice": (
        lambda: train(Int8Trainer(unsupported="fp32"), network(Shared(nn.GroupNorm(2, 8)))),
        "make a module for each",
        lambda: train(
            Int8Trainer(unsupported="fp32"),
            network(nn.Sequential(nn.GroupNorm(2, 8), nn.GroupNorm(2, 8))),
        ),
    ),
    "a layer that is called twice, in a module": (
        lambda: train(Int8Trainer(), network(Shared(nn.Conv2d(8, 8, 1)))),
        "or list the module around them in",
        lambda: train(Int8Trainer(fp32_operators=["2"]), network(Shared(nn.Conv2d(8, 8, 1)))),
    ),
}


class Shared(nn.Module):
    """A user's module that calls another one twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


@pytest.mark.parametrize("name", REMEDIES)
def test_who_follows_another_refusals_advice_gets_on(name: str) -> None:
    mistake, advice, remedy = REMEDIES[name]
    assert advice in refused(mistake)
    remedy()


def test_a_function_without_weights_may_run_in_fp32_in_several_places() -> None:
    train(Int8Trainer(unsupported="fp32"), network(Shared(nn.GELU())))


@pytest.mark.parametrize(
    "trainer", [Int8Trainer(), MixedPrecisionTrainer(rule="half", parallel=False)]
)
def test_a_flower_run_of_such_a_network_ends_with_the_refusal_and_trains_nothing(
    trainer: Trainer,
) -> None:
    """Under Flower's FedAvg, which leaves out clients that fail and would keep the first weights for all rounds."""
    inputs, labels = batch()

    def data(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
        return LabelledData(inputs, labels, mean=(0.0,) * 3, std=(1.0,) * 3, num_classes=4)

    client, server, rounds = (
        make_client_app(lambda context: network(nn.GELU()), data, trainer),
        ServerApp(),
        [],
    )

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        FedAvg().start(
            grid,
            ArrayRecord(network(nn.GELU()).state_dict()),
            num_rounds=2,
            evaluate_fn=lambda server_round, arrays: rounds.append(server_round),
        )

    with pytest.raises(
        TrainingFailed,
        match=rf"2: int8 training has no GELU; use {type(trainer).__name__}\(.*'fp32'",
    ):
        run_app(server, client, cluster=parse_cluster({"boards": [2]}), num_workers=0)
