"""F9 to F12 in a client: two processors make one step, and a broken one costs speed but no samples."""

import copy
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from socflower.errors import TrainingFailed
from socflower.hierarchy.exchange.gradients import EXACT_RING
from socflower.model_graph.random_state import forked_generator
from socflower.precision import NITI, Int8Backend, NativeInt8Backend
from socflower.precision.cpu_share import accuracy_floor, cpu_samples, cpu_share
from socflower.precision.int8.model import StepResult
from socflower.training.exchange.group_sum import GroupSum
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.schedules import cosine_annealing
from socflower.training.trainer import Part, SessionResult, TrainingSpan
from tests.clients.test_app import fresh, group_task, make_app, message, metrics_of, node
from tests.one_line import refused
from tests.seeded import built
from tests.training.by_torch import assert_close, assert_equal
from tests.training.test_group import parts_of, small_data, small_network

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 0)


# ------------------------------------------------------------------------------------------ accelerators by hand
class ExactBackend(Int8Backend):
    """Plain SGD in float64: an accelerator that loses nothing. Weights come to it by `load_weights` only."""

    dtype = torch.float64
    name = "exact"

    def __init__(self) -> None:
        self.loaded: list[dict[str, Tensor]] = []
        self.predicted: list[Tensor] = []
        self.seed = -1

    def build(self, module: nn.Module, input_shape: tuple[int, int, int]) -> None:
        self.model = copy.deepcopy(module).to(self.dtype).train()
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # and so no random numbers
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.fill_(99)

    def load_weights(self, weights: Mapping[str, Any], *, seed: int) -> None:
        self.seed = seed
        taken = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
        self.loaded.append(taken)
        self.model.load_state_dict(taken, strict=False)

    def train_step(
        self, images: Any, labels: Any, *, learning_rate: float, progress: float
    ) -> StepResult:
        assert 0.0 <= progress <= 1.0 and len(images) == len(labels) > 0
        logits = self.model(torch.from_numpy(images).to(self.dtype))
        loss = functional.cross_entropy(logits, torch.from_numpy(labels).long())
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= learning_rate * self.coarse(parameter.grad)
                parameter.grad = None
        return StepResult(loss=loss.item(), num_correct=0, num_samples=len(labels))

    def coarse(self, gradient: Tensor) -> Tensor:
        return gradient

    def weights(self) -> dict[str, Any]:
        return {name: tensor.detach().numpy() for name, tensor in self.model.state_dict().items()}

    def predict(self, images: Any) -> Any:
        self.predicted.append(torch.from_numpy(images))
        with torch.no_grad():
            logits = copy.deepcopy(self.model).eval()(torch.from_numpy(images).to(self.dtype))
        return logits.numpy().astype(np.float64)


class CoarseBackend(ExactBackend):
    """Rounds gradients to multiples of 0.05, so that its work can be told from the CPU's."""

    def coarse(self, gradient: Tensor) -> Tensor:
        return (gradient / 0.05).round() * 0.05


class ScriptedBackend(CoarseBackend):
    """Agrees with the true logits of three classes to the given cosines, one a measurement."""

    def __init__(self, cosines: Sequence[float]) -> None:
        super().__init__()
        self.cosines = list(cosines)

    def predict(self, images: Any) -> Any:
        logits = super().predict(images)
        cosine = self.cosines.pop(0)
        across = np.cross(logits, np.array([0.3, -0.5, 0.8]))
        across *= np.linalg.norm(logits, axis=1, keepdims=True) / np.linalg.norm(
            across, axis=1, keepdims=True
        )
        return cosine * logits + np.sqrt(1.0 - cosine**2) * across


def trainer_of(
    backend: Callable[[], Int8Backend] = ExactBackend,
    rule: str = "half",
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    cosine: bool = False,
    parallel: bool = False,
    **changes: Any,
) -> MixedPrecisionTrainer:
    fp32 = FP32Trainer(
        optimizer=sgd(0.1, momentum, weight_decay), scheduler=cosine_annealing if cosine else None
    )
    return MixedPrecisionTrainer(
        fp32=fp32, rule=rule, backend=backend, parallel=parallel, **changes
    )


def network(*, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    layers = small_network(norm=norm)
    if dropout:
        layers.insert(len(layers) - 1, nn.Dropout(dropout))
    return layers


def batches(num: int, sizes: Sequence[int]) -> list[list[Part]]:
    """Return the parts of `num` different batches."""
    data = small_data(num * sum(sizes))
    parts = parts_of(data, list(sizes) * num)
    return [parts[start : start + len(sizes)] for start in range(0, len(parts), len(sizes))]


def run(
    trainer: Any,
    model: nn.Module,
    steps: Sequence[list[Part]],
    state: bytes | None = None,
    *,
    total_steps: int = 12,
    steps_per_epoch: int = 100,
    **span: Any,
) -> tuple[list[float], SessionResult]:
    whole_span = TrainingSpan(
        num_members=len(steps[0]), total_steps=total_steps, steps_per_epoch=steps_per_epoch, **span
    )
    session = trainer.start(model, whole_span, state)
    return [float(session.step(parts)) for parts in steps], session.finish()


def whole(parts: Sequence[Part]) -> list[Part]:
    return [
        (torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts]))
    ]


def never() -> Int8Backend:
    raise AssertionError("the rule asks for no accelerator")


# ------------------------------------------------------------------------------------------ F11: the FP32 rule
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sizes", [(9,), (4, 0, 7)])
def test_the_fp32_rule_is_fp32_training_bit_for_bit(norm: bool, sizes: tuple[int, ...]) -> None:
    """Straight through and resumed; with momentum, weight decay and a schedule."""
    trainer = trainer_of(never, "fp32", momentum=0.9, weight_decay=0.01, cosine=True)
    data = batches(6, sizes)
    for cuts in ([(0, 6)], [(0, 2), (2, 6)]):
        ours = network(norm=norm)
        reference = network(norm=norm)
        state = expected = None
        for begin, end in cuts:
            losses, left = run(trainer, ours, data[begin:end], state, first_step=begin)
            same_losses, left_by_fp32 = run(
                trainer.fp32, reference, data[begin:end], expected, first_step=begin
            )
            state = left.state
            expected = left_by_fp32.state
            assert losses == same_losses
            assert (left.metrics, left.events) == ({"cpu-share": 1.0}, ())
            assert_equal(ours, reference)


# ------------------------------------------------------------------------------------------ F4 and F12: the merge
@settings(max_examples=25)
@given(sizes=SIZES, rule=st.sampled_from(["paper", "normalised", "half", "int8"]), data=st.data())
def test_with_an_exact_accelerator_a_mixed_step_is_a_step_on_the_whole_batch(
    sizes: list[int],
    rule: str,
    data: st.DataObject,
) -> None:
    """Whatever the members' shares and their processors': every sample weighs the same (F4)."""
    ratios = tuple(data.draw(st.floats(0.0, 1.0)) for _ in sizes)
    ours = network()
    reference = network()
    steps = batches(3, sizes)
    trainer = trainer_of(rule=rule, momentum=0.9, weight_decay=0.01)
    losses, _ = run(trainer, ours, steps, npu_ratios=ratios)
    expected, _ = run(trainer.fp32, reference, [whole(parts) for parts in steps])
    assert losses == pytest.approx(expected, abs=1e-5)
    assert_close(ours, reference)


def gradients_by_hand(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            functional.cross_entropy(model(inputs), labels), list(model.parameters())
        )
    )


@pytest.mark.parametrize("members", [(8,), (3, 5)])
def test_momentum_and_weight_decay_live_on_the_master(members: tuple[int, ...]) -> None:
    """The reference is torch's optimiser fed with the merged gradient; the accelerator only ever sees masters."""
    made: list[CoarseBackend] = []

    def backend() -> CoarseBackend:
        made.append(CoarseBackend())
        return made[-1]

    ours = network()
    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    steps = batches(4, members)
    masters = []
    run(trainer_of(backend, momentum=0.9, weight_decay=0.05), ours, steps)
    for step in steps:
        masters.append(
            {name: weight.detach().clone() for name, weight in reference.named_parameters()}
        )
        optimizer.zero_grad()
        for parameter in reference.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for inputs, labels in step:
            size = cpu_samples(len(labels), 0.5)
            for part, num, coarse in (
                (slice(size), size, False),
                (slice(size, None), len(labels) - size, True),
            ):
                for parameter, gradient in zip(
                    reference.parameters(),
                    gradients_by_hand(reference, inputs[part], labels[part]),
                    strict=True,
                ):
                    merged = (gradient / 0.05).round() * 0.05 if coarse else gradient
                    parameter.grad += merged * num / sum(members)
        optimizer.step()
    assert_close(ours, reference)
    (backend_,) = made
    seen = backend_.loaded[-len(members) * len(steps) :]
    for number, loaded in enumerate(seen):
        for name, master in masters[number // len(members)].items():
            torch.testing.assert_close(loaded[name], master, rtol=1e-4, atol=2e-6)


@settings(max_examples=25)
@given(
    sizes=SIZES,
    rule=st.sampled_from(["paper", "normalised"]),
    cosine=st.floats(0.0, 1.0),
    data=st.data(),
)
def test_the_reported_share_is_gamma_and_lies_between_1_minus_beta_and_1(
    sizes: list[int],
    rule: str,
    cosine: float,
    data: st.DataObject,
) -> None:
    """To half a sample of each member, because samples are whole; what accuracy asks for is only rounded up."""
    ratios = tuple(data.draw(st.floats(0.0, 1.0)) for _ in sizes)
    trainer = trainer_of(lambda: ScriptedBackend([cosine]), rule)
    _, end = run(trainer, network(), batches(1, sizes), npu_ratios=ratios)
    on_cpu = end.metrics["cpu-share"] * sum(sizes)
    floor = accuracy_floor(rule, cosine)
    least = 0.0
    most = 0.0
    of_beta = 0.0
    for ratio, size in zip(ratios, sizes, strict=True):
        gamma = cpu_share(rule, cosine, ratio)
        least += max(gamma * size - 0.5, floor * size) if size else 0.0
        most += max(gamma * size + 0.5, floor * size + 1.0) if size else 0.0
        of_beta += (1.0 - ratio) * size - 0.5
    assert max(least, of_beta) - 1e-4 <= on_cpu <= most + 1e-4  # alpha is that of float32 logits
    assert on_cpu <= sum(sizes)


# ------------------------------------------------------------------------------------------ accelerators that fail
class FailingBackend(CoarseBackend):
    """Fails in one way from one step on; the step is known from the seed."""

    def __init__(self, way: str, step: int) -> None:
        super().__init__()
        self.way = way
        self.step = step
        if way == "make":
            raise OSError("make\nfailed on purpose")

    def fails(self, way: str) -> bool:
        return self.way == way and self.seed >= self.step

    def fail_in(self, where: str) -> None:
        if self.way == where and (where == "build" or self.seed >= self.step):
            raise RuntimeError(f"{where}\nfailed on purpose")

    def build(self, module: nn.Module, input_shape: tuple[int, int, int]) -> None:
        self.fail_in("build")
        super().build(module, input_shape)

    def load_weights(self, weights: Mapping[str, Any], *, seed: int) -> None:
        self.seed = seed
        self.fail_in("load_weights")
        if self.fails("divergence"):
            raise TrainingFailed("0.weight: a value is not finite")
        super().load_weights(weights, seed=seed)

    def train_step(
        self, images: Any, labels: Any, *, learning_rate: float, progress: float
    ) -> StepResult:
        self.fail_in("train_step")
        result = super().train_step(images, labels, learning_rate=learning_rate, progress=progress)
        with torch.no_grad():
            if self.fails("NaN gradient"):
                list(self.model.parameters())[-1][0] = torch.nan
            if self.fails("infinite gradient"):
                next(self.model.parameters())[0] = -torch.inf
        return replace(result, loss=float("nan")) if self.fails("NaN loss") else result

    def weights(self) -> dict[str, Any]:
        self.fail_in("weights")
        return super().weights()

    def pseudo_gradient(
        self, loaded: Mapping[str, Any], *, learning_rate: float
    ) -> Mapping[str, Any]:
        gradients = dict(super().pseudo_gradient(loaded, learning_rate=learning_rate))
        if self.fails("wrong shape"):
            gradients["0.weight"] = gradients["0.weight"][:2]
        if self.fails("unknown name"):
            gradients["7.weight"] = gradients["0.weight"]
        return gradients

    def predict(self, images: Any) -> Any:
        self.fail_in("predict")
        logits = super().predict(images)
        return logits[:, :2] if self.fails("odd logits") else logits


def fails_once(way: str, step: int) -> Callable[[], Int8Backend]:
    """Return a maker of accelerators: the first fails and the next ones do not."""
    ways = iter([way])
    return lambda: FailingBackend(next(ways, ""), step)


IN_A_STEP = (
    "load_weights",
    "divergence",
    "train_step",
    "weights",
    "NaN loss",
    "NaN gradient",
    "infinite gradient",
    "wrong shape",
    "unknown name",
)
BEFORE_A_STEP = [("make", 0), ("build", 0), *product(("predict", "odd logits"), (0, 2))]
FAILURES = [
    *((way, step, False) for way, step in [*BEFORE_A_STEP, *product(IN_A_STEP, (0, 1, 2))]),
    *((way, 1, True) for way in IN_A_STEP),
]


@pytest.mark.parametrize(("way", "step", "parallel"), FAILURES)
def test_a_failing_accelerator_is_left_out_and_its_share_goes_to_the_cpu(
    way: str, step: int, parallel: bool
) -> None:
    """From the step of the failure on it is FP32 training on the whole batch; epochs begin at steps 0 and 2."""
    steps = batches(5, (5, 7))
    ours = network()
    reference = network()
    trainer = trainer_of(fails_once(way, step), momentum=0.9, parallel=parallel)
    losses, end = run(trainer, ours, steps[:4], steps_per_epoch=2)
    state = None
    expected = []
    if step:
        healthy = trainer_of(CoarseBackend, momentum=0.9)
        expected, left = run(healthy, reference, steps[:step], steps_per_epoch=2)
        state = left.state
    alone, _ = run(
        trainer_of(never, "fp32", momentum=0.9), reference, steps[step:4], state, first_step=step
    )
    assert losses == pytest.approx(expected + alone, abs=1e-5)
    assert_close(ours, reference)
    (event,) = end.events
    name = "int8 backend" if way == "make" else "exact"
    assert f"{name} failed" in event and f"at step {step} " in event and "\n" not in event
    if way in ("make", "build", "load_weights", "train_step", "predict", "weights"):
        assert f"Error: {way} failed on purpose" in event
    # 3 and 4 of 5 and 7 are the CPU's where the accelerator works.
    assert end.metrics["cpu-share"] == pytest.approx((step * 7 + (4 - step) * 12) / 48)
    losses, following = run(trainer, ours, steps[4:], end.state, first_step=4, steps_per_epoch=2)
    assert following.events == ()
    assert following.metrics["cpu-share"] == pytest.approx(7 / 12)
    assert np.isfinite(losses).all()


def test_a_reply_tells_of_the_failure_and_the_next_message_tries_again() -> None:
    app = make_app(trainer=trainer_of(fails_once("train_step", 1)))
    context = node(2)
    model = fresh()
    first = app(message(group=group_task(), model=model), context)
    assert [
        len(text.splitlines()) for text in first.content.config_records["socflower-events"]["texts"]
    ] == [1]
    assert 0.5 < metrics_of(first)["cpu-share"] < 1.0
    assert sum(metrics_of(first)["socflower-alpha-steps"]) == 2.0
    second = app(message(group=group_task(first_step=2, num_steps=1), model=model), context)
    assert "socflower-events" not in second.content.config_records
    assert metrics_of(second)["cpu-share"] == 5 / 8  # halves of 3 and of 5, rounded up


class KeepsItsStatistics(FailingBackend):
    """Hands gradients out itself, so that `weights` is asked for running statistics only."""

    def pseudo_gradient(
        self, loaded: Mapping[str, Any], *, learning_rate: float
    ) -> Mapping[str, Any]:
        return {
            name: (loaded[name] - weight.detach().numpy()) / np.float32(learning_rate)
            for name, weight in self.model.float().named_parameters()
        }


KeepsItsStatistics.dtype = torch.float32


def test_statistics_that_fail_at_an_epochs_start_cost_no_samples() -> None:
    steps = batches(4, (8,))
    ours = network(norm=True)
    reference = network(norm=True)
    failing = trainer_of(lambda: KeepsItsStatistics("weights", 1))
    losses, end = run(failing, ours, steps, steps_per_epoch=2)
    first, left = run(trainer_of(CoarseBackend), reference, steps[:2], steps_per_epoch=2)
    alone, _ = run(trainer_of(never, "fp32"), reference, steps[2:], left.state, first_step=2)
    assert losses == pytest.approx(first + alone, abs=1e-5)
    for weight, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=2e-6)
    (event,) = end.events
    assert "at step 2 " in event
    assert end.metrics["cpu-share"] == pytest.approx((2 * 4 + 2 * 8) / 32)


@pytest.mark.parametrize("way", ["weights", "NaN statistics"])
def test_statistics_that_fail_at_the_end_are_the_cpus(way: str) -> None:
    class Spoilt(KeepsItsStatistics):
        def weights(self) -> dict[str, Any]:
            factor = np.float32("nan" if way == "NaN statistics" else 1.0)
            return {name: array * factor for name, array in super().weights().items()}

    model = network(norm=True)
    session = trainer_of(lambda: Spoilt(way, 0)).start(model, TrainingSpan(steps_per_epoch=100))
    for parts in batches(3, (8,)):
        session.step(parts)
    of_cpu = {name: buffer.clone() for name, buffer in model.named_buffers()}
    (event,) = session.finish().events
    assert "at step 3 " in event
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, of_cpu[name])


# ------------------------------------------------------------------------------------------ two workers
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("backend", [ExactBackend, NativeInt8Backend])
def test_in_parallel_and_in_turn_give_equal_weights(
    norm: bool, backend: Callable[[], Int8Backend]
) -> None:
    models = []
    for parallel in (False, True):
        models.append(network(norm=norm))
        trainer = trainer_of(backend, parallel=parallel, momentum=0.9)
        _, end = run(trainer, models[-1], batches(5, (6, 5)), steps_per_epoch=2)
        assert end.events == () and end.metrics["cpu-share"] == pytest.approx(6 / 11)
    assert_equal(*models)


def test_the_workers_overlap() -> None:
    """Each waits inside its own step until the other is inside of its."""
    meeting = threading.Barrier(2, timeout=60.0)
    caller = threading.current_thread()

    class Meets(ExactBackend):
        def train_step(
            self, images: Any, labels: Any, *, learning_rate: float, progress: float
        ) -> StepResult:
            meeting.wait()
            return super().train_step(
                images, labels, learning_rate=learning_rate, progress=progress
            )

    def meet(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module.training and threading.current_thread() is caller:
            meeting.wait()

    model = network()
    model.register_forward_hook(meet)
    _, end = run(trainer_of(Meets, parallel=True), model, batches(3, (8,)))
    assert end.events == ()
    assert not meeting.broken


# ------------------------------------------------------------------------------------------ F9: alpha
@pytest.mark.parametrize("held_out", [None, torch.linspace(0, 1, 180).reshape(5, 1, 6, 6)])
def test_alpha_is_measured_once_an_epoch_however_short_the_sessions(
    held_out: Tensor | None,
) -> None:
    """Epochs of four steps, sessions of two: the state carries alpha into the second half of an epoch."""
    model = network()
    state = None
    steps = batches(8, (3, 4))
    for first, alpha in ((0, 0.9), (2, 0.9), (4, 0.5), (6, 0.5)):
        begins = first % 4 == 0
        backend = ScriptedBackend([alpha] if begins else [])
        trainer = trainer_of(lambda made=backend: made, held_out=held_out)
        own = steps[first : first + 2]
        _, end = run(trainer, model, own, state, first_step=first, steps_per_epoch=4)
        state = end.state
        assert end.events == ()
        assert end.metrics["socflower-copy-similarity"] == pytest.approx([alpha], abs=1e-5)
        assert end.metrics["socflower-alpha-steps"] == [2.0]
        assert len(backend.predicted) == begins
        for seen in backend.predicted:
            assert torch.equal(seen, whole(own[0])[0][0] if held_out is None else held_out)


def test_each_alpha_is_reported_with_its_steps() -> None:
    trainer = trainer_of(lambda: ScriptedBackend([0.9, 0.2, 0.7]))
    _, end = run(trainer, network(), batches(7, (4,)), first_step=2, steps_per_epoch=4)
    assert end.metrics["socflower-copy-similarity"] == pytest.approx([0.9, 0.2, 0.7], abs=1e-5)
    assert end.metrics["socflower-alpha-steps"] == [2.0, 4.0, 1.0]


def test_measuring_alpha_changes_neither_weights_nor_statistics_nor_random_numbers() -> None:
    """Every step against once: settling statistics in between changes nothing, because averaging is linear."""
    models = []
    random_states = []
    for steps_per_epoch in (1, 100):
        torch.manual_seed(4)
        models.append(network(norm=True, dropout=0.4))
        run(
            trainer_of(CoarseBackend, held_out=torch.rand(7, 1, 6, 6)),
            models[-1],
            batches(6, (8,)),
            steps_per_epoch=steps_per_epoch,
        )
        random_states.append(torch.get_rng_state())
    assert torch.equal(*random_states)
    for ours, reference in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, reference)
    assert_close(*models)


def test_both_sides_are_compared_on_the_same_weights_and_statistics() -> None:
    """So that an exact accelerator has alpha = 1 at the start of every epoch."""
    _, end = run(trainer_of(), network(norm=True), batches(6, (8, 5)), steps_per_epoch=2)
    assert end.metrics["socflower-copy-similarity"] == pytest.approx(
        [1.0] * len(end.metrics["socflower-copy-similarity"]), abs=1e-9
    )
    assert sum(end.metrics["socflower-alpha-steps"]) == 6


# ------------------------------------------------------------------------------------------ F10: beta
class Told(ExactBackend):
    """Knows its throughput; counts how often it is asked."""

    asked = 0

    def __init__(self, known: float) -> None:
        super().__init__()
        self.known = known

    def samples_per_s(self, batch_size: int) -> float:
        type(self).asked += 1
        return self.known


@pytest.fixture(autouse=True)
def nobody_was_asked() -> None:
    Told.asked = 0


def seconds_in(state: bytes) -> list[float] | None:
    return json.loads(state.partition(b"\n")[0]).get("seconds")


@pytest.mark.parametrize(
    ("rule", "ratios", "share"),
    [("normalised", (0.25, 0.75), (6 + 3) / 20), ("half", (), 0.5), ("int8", (), 0.0)],
)
def test_beta_is_not_measured_where_it_is_planned_or_not_needed(
    rule: str, ratios: tuple[float, ...], share: float
) -> None:
    trainer = trainer_of(lambda: Told(1e12), rule)
    _, end = run(trainer, network(), batches(2, (8, 12)), npu_ratios=ratios)
    assert end.metrics["cpu-share"] == pytest.approx(share)
    assert Told.asked == 0 and seconds_in(end.state) is None


def test_else_beta_is_measured_once_and_carried_in_the_state() -> None:
    """A hopelessly slow accelerator gets nothing, also a few steps after it has become infinitely fast."""
    speeds = iter([1e-12, 1e12])
    model = network()
    steps = batches(4, (8,))
    trainer = trainer_of(lambda: Told(next(speeds)), "normalised")
    _, first = run(trainer, model, steps[:2], steps_per_epoch=1)
    assert first.metrics["cpu-share"] == 1.0
    assert Told.asked == 1
    _, second = run(trainer, model, steps[2:], first.state, first_step=2, steps_per_epoch=1)
    assert second.metrics["cpu-share"] == 1.0
    assert Told.asked == 1  # it has had no samples since
    assert seconds_in(second.state) == seconds_in(first.state)


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("merge", ["gradients", "weights"])
def test_an_accelerator_without_samples_is_timed_again_within_50_steps(
    sessions: int, merge: str
) -> None:
    """However short the sessions are; what it has trained on its own by then stays."""

    class Changes(Told):
        def samples_per_s(self, batch_size: int) -> float:
            super().samples_per_s(batch_size)
            return 1e-12 if type(self).asked == 1 else 1e12

    model, state = network(), None
    trainer = trainer_of(lambda: Changes(0.0), "normalised", merge=merge)
    shares = []
    for session in range(sessions):
        steps = batches(56 // sessions, (8,))
        first = session * len(steps)
        _, end = run(trainer, model, steps, state, first_step=first, total_steps=56)
        state = end.state
        shares += [end.metrics["cpu-share"]]
    assert Changes.asked >= 2
    # Of 56 steps 49 have passed before the measurement, and fewer than 50.
    assert shares[-1] == pytest.approx(49 / 56 if sessions == 1 else 0.0)
    assert shares[:-1] == [1.0] * (sessions - 1)


@pytest.mark.parametrize(("size", "rule"), [*product((2, 3, 4, 5, 9), ("paper", "half", "int8"))])
def test_no_processor_normalises_a_batch_of_one_sample(size: int, rule: str) -> None:
    sizes: list[int] = []

    class Counts(ExactBackend):
        def train_step(self, images: Any, labels: Any, **settings: Any) -> StepResult:
            sizes.append(len(labels))
            return super().train_step(images, labels, **settings)

    model = network(norm=True)
    model[1].register_forward_pre_hook(
        lambda module, inputs: sizes.append(len(inputs[0])) if module.training else None
    )
    for npu_ratio in (0.99, 0.7, 0.2):
        trainer = trainer_of(Counts, rule, npu_ratio=npu_ratio)
        _, end = run(trainer, model, batches(1, (size,)))
        assert end.events == ()
    assert sizes and min(sizes) > 1


def test_a_fast_accelerator_gets_all_that_the_rule_allows() -> None:
    for rule, share in (("normalised", 0.0), ("paper", np.exp(-1.0))):
        _, end = run(trainer_of(lambda: Told(1e12), rule), network(), batches(2, (400,)))
        assert end.metrics["cpu-share"] == pytest.approx(share, abs=1 / 400)


def test_a_throughput_that_is_told_is_not_renewed_by_the_stopwatch() -> None:
    """The machine that plays the accelerator is much slower than what it plays, for many more steps than `patience`."""
    _, end = run(trainer_of(lambda: Told(1e12), "normalised"), network(), batches(25, (8,)))
    assert end.metrics["cpu-share"] == 0.0
    assert (seconds_in(end.state) or [])[1] == pytest.approx(1e-12)


def test_measuring_beta_leaves_weights_statistics_and_random_numbers_alone() -> None:
    """By a real measurement; that it gives a split at all shows that both sides were timed."""
    backend = ExactBackend()
    model = network(norm=True, dropout=0.4)
    before = copy.deepcopy(model)
    session = trainer_of(lambda: backend, "normalised").start(model, TrainingSpan())
    random_state = torch.get_rng_state()
    session._prepare(batches(1, (40,))[0])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_equal(model, before)
    assert_equal(backend.model.float(), before)
    cpu_s, npu_s = seconds_in(session.finish().state) or (0.0, 0.0)
    assert cpu_s > 0.0 and npu_s > 0.0


# ------------------------------------------------------------------------------------------ running statistics
def norm_first() -> nn.Sequential:
    """A network whose running statistics are those of its inputs, whatever its weights."""
    return built(
        lambda: nn.Sequential(
            nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        6,
    )


@pytest.mark.parametrize(("rule", "size"), [("half", 8), ("half", 5), ("int8", 6), ("fp32", 6)])
def test_running_statistics_are_the_sample_weighted_mean_of_both_processors(
    rule: str, size: int
) -> None:
    model = norm_first()
    steps = batches(4, (size,))
    on_cpu = cpu_samples(size, cpu_share(rule, 1.0, 0.0))
    expected = torch.zeros(2)
    for part, num in ((slice(on_cpu), on_cpu), (slice(on_cpu, None), size - on_cpu)):
        mean = torch.tensor(0.0)
        var = torch.tensor(1.0)
        for ((inputs, _),) in steps if num else ():
            mean = 0.9 * mean + 0.1 * inputs[part].mean()
            var = 0.9 * var + 0.1 * inputs[part].var(unbiased=True)
        expected += num / size * torch.stack([mean, var])
    run(trainer_of(rule=rule), model, steps)
    torch.testing.assert_close(torch.cat([model[0].running_mean, model[0].running_var]), expected)


def test_an_accelerator_in_the_middle_of_an_epoch_starts_from_the_models_statistics() -> None:
    """Its alpha is known from the state, so nothing but the statistics themselves would hand them over."""
    straight = norm_first()
    resumed = norm_first()
    steps = batches(4, (8,))
    trainer = trainer_of(CoarseBackend)
    run(trainer, straight, steps, steps_per_epoch=4)
    _, end = run(trainer, resumed, steps[:2], steps_per_epoch=4)
    run(trainer, resumed, steps[2:], end.state, first_step=2, steps_per_epoch=4)
    assert_close(resumed, straight)


# ------------------------------------------------------------------------------------------------- energy
class MeteredBackend(ExactBackend):
    """Draws 3 J a step, after 100 J before the session."""

    def energy_j(self) -> float | None:
        return 100.0 + 3.0 * self.steps

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def train_step(self, *args: Any, **kwargs: Any) -> StepResult:
        self.steps += 1
        return super().train_step(*args, **kwargs)


def test_a_backend_that_tells_its_energy_is_reported_with_what_the_session_drew() -> None:
    _, end = run(trainer_of(MeteredBackend), network(), batches(4, [6]))
    assert end.metrics["npu-energy-j"] == 12.0
    _, end = run(trainer_of(), network(), batches(1, [6]))
    assert "npu-energy-j" not in end.metrics


def test_a_meter_that_breaks_drops_the_backend_and_keeps_the_work() -> None:
    class BrokenMeter(MeteredBackend):
        def energy_j(self) -> float | None:
            if self.steps:
                raise OSError("no such sensor")
            return 0.0

    _, end = run(trainer_of(BrokenMeter), network(), batches(1, [6]))
    (event,) = end.events
    assert "no such sensor" in event and "npu-energy-j" not in end.metrics


# ------------------------------------------------------------------------------------------ what is frozen
@pytest.mark.parametrize(
    "backend", [CoarseBackend, NativeInt8Backend, partial(NativeInt8Backend, NITI)]
)
@pytest.mark.parametrize("sizes", [(10,), (4, 0, 7)])
@pytest.mark.parametrize("rule", ["half", "int8"])
def test_frozen_parameters_are_bit_for_bit_what_they_were(
    backend: Callable[[], Int8Backend],
    sizes: tuple[int, ...],
    rule: str,
) -> None:
    """With weight decay, and whatever the accelerator does to its own copies."""
    model = network(norm=True)
    names = [name for name, _ in model.named_parameters()][::2]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(trainer_of(backend, rule, weight_decay=0.1), model, batches(3, sizes))
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, before[name]) == (name in names), name


# ------------------------------------------------------------------------------------------ momentum over noise
@pytest.mark.parametrize("optimizer", [sgd(0.1, 0.9), partial(torch.optim.Adam, lr=0.01)])
def test_momentum_over_the_rounding_noise_of_niti_is_refused_and_either_advice_works(
    optimizer: Any,
) -> None:
    trainer = trainer_of(partial(NativeInt8Backend, NITI))
    steps = batches(2, (6,))
    noisy = replace(trainer, fp32=FP32Trainer(optimizer=optimizer))
    refused(lambda: run(noisy, network(), steps), "optimizer=sgd(learning_rate, momentum=0.0)")
    run(trainer, network(), steps)
    run(replace(noisy, backend=NativeInt8Backend), network(), steps)


# ------------------------------------------------------------------------------------------ dropout
def test_dropout_in_both_processors_gives_equal_weights_in_parallel_and_in_turn() -> None:
    """And one seed of torch's generator gives one training."""
    seen = []
    for seed, parallel in ((1, False), (1, True), (2, False)):
        model = network(dropout=0.3)
        with forked_generator(seed):
            run(trainer_of(NativeInt8Backend, parallel=parallel), model, batches(3, (6, 5)))
        seen.append(model)
    assert_equal(seen[0], seen[1])
    assert not torch.equal(seen[0][0].weight, seen[2][0].weight)


def test_members_and_steps_drop_differently() -> None:
    """Of two members with equal samples, and of two steps at rate 0."""

    class Telling(NativeInt8Backend):
        """Notes what it is told to draw from."""

        def draw_from(self, seed: int) -> None:
            seeds.append(seed)
            super().draw_from(seed)

    seeds: list[int] = []
    run(trainer_of(Telling, "int8"), network(dropout=0.3), batches(2, (5, 0, 5)))
    assert len(seeds) == len(set(seeds)) == 4
    seeds.clear()
    run(trainer_of(Telling, "int8"), network(), batches(2, (5, 5)))
    assert not seeds


def test_without_dropout_the_accelerator_takes_no_random_number() -> None:
    model = network(norm=True)
    steps = batches(2, (5, 5))
    with forked_generator():
        before = torch.get_rng_state()
        run(trainer_of(NativeInt8Backend), model, steps)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_pass_that_is_repeated_counts_once() -> None:
    """As in a ring: the statistics of the int8 backend enter the mean with the part of the samples that it had."""
    for repeats in (1, 3):
        session = trainer_of().start(norm_first(), TrainingSpan(total_steps=2, steps_per_epoch=2))
        for parts in batches(2, [7]):
            for _ in range(repeats):
                session.gradients(parts, 7)
            session.apply()
        counts = session._counts
        counted = counts.int8_since_average, counts.since_average
        assert counted == (6, 14)


def test_members_that_compute_one_by_one_train_and_count_as_the_group() -> None:
    """As their gradients are summed in a ring's order, or compressed."""
    trainer, ours, reference = trainer_of(), network(), network()
    steps = batches(3, (4, 2, 6))
    span = TrainingSpan(num_members=3, total_steps=12, steps_per_epoch=100)
    session = trainer.start(ours, span)
    group = GroupSum(session, ours, EXACT_RING, range(3), num_buckets=2, seed=0, residuals={})
    for step, parts in enumerate(steps):
        group.step(parts, range(3), step)
    found = session.finish().metrics
    _, expected = run(trainer, reference, steps)
    assert_close(ours, reference)
    assert found["cpu-share"] == expected.metrics["cpu-share"]
