"""Eq. 5 of SoCFlow+: NPUs train int8 models of their own, which are merged when a session ends."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from socflower.precision import NITI, NativeInt8Backend
from socflower.precision.cpu_share import accuracy_floor, confidence, cpu_samples, cpu_share
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import Part, TrainingSpan
from tests.one_line import refused
from tests.training.by_torch import assert_close, assert_equal
from tests.training.test_group import small_data
from tests.training.test_mixed_precision import (
    CoarseBackend,
    ExactBackend,
    batches,
    fails_once,
    network,
    run,
    trainer_of,
)

HELD_OUT = small_data(24).inputs.float()[16:] / 255.0
BETA = 0.75


def merging(
    backend: Any = ExactBackend, rule: str = "paper", **changes: Any
) -> MixedPrecisionTrainer:
    return trainer_of(
        backend, rule, **{"merge": "weights", "held_out": HELD_OUT, "npu_ratio": BETA, **changes}
    )


def logits_of(model: nn.Module) -> Any:
    model.eval()
    with torch.no_grad():
        return model(HELD_OUT).numpy()


def parts_for(steps: Sequence[Sequence[Part]], rule: str) -> list[tuple[list[Part], list[Part]]]:
    """Return what the CPUs and the NPUs get of each step, at the alpha of exact copies of the same weights, 1."""
    share, floor = cpu_share(rule, 1.0, BETA), accuracy_floor(rule, 1.0)
    halves = []
    for parts in steps:
        sizes = [cpu_samples(len(labels), share, floor) for _, labels in parts]
        halves.append(
            (
                [(x[:n], y[:n]) for (x, y), n in zip(parts, sizes, strict=True)],
                [(x[n:], y[n:]) for (x, y), n in zip(parts, sizes, strict=True)],
            )
        )
    return halves


# ------------------------------------------------------------------------------------------ Eq. 5
@pytest.mark.parametrize("rule", ["paper", "normalised", "half"])
@pytest.mark.parametrize("sizes", [(12,), (8, 5)])
def test_a_session_ends_in_the_mean_of_the_members_merged_weights(
    rule: str, sizes: tuple[int, ...]
) -> None:
    """Against trainings apart: one of all CPUs' samples, and one of each NPU's."""
    steps, ours = batches(4, sizes), network()
    _, end = run(merging(rule=rule), ours, steps)
    halves = parts_for(steps, rule)
    plain = FP32Trainer(optimizer=sgd(0.1, 0.0))
    cpus = network()
    run(plain, cpus, [[*cpu] for cpu, _ in halves])
    merged: dict[str, Tensor] = {}
    alphas = []
    for member, size in enumerate(sizes):
        npu = network()
        run(plain, npu, [[own[member]] for _, own in halves])
        alphas.append(confidence(logits_of(cpus), logits_of(npu)))
        gamma = cpu_share(rule, alphas[-1], BETA)
        for name, weight in npu.state_dict().items():
            mixed = gamma * cpus.state_dict()[name] + (1.0 - gamma) * weight
            merged[name] = merged.get(name, 0.0) + mixed * size / sum(sizes)
    expected = network()
    expected.load_state_dict(merged)
    assert_close(ours, expected)
    # What was measured before the merge is in force from then on.
    _, following = run(merging(rule=rule), ours, batches(1, sizes), end.state, first_step=4)
    assert end.metrics["socflower-alpha"] == pytest.approx([1.0])
    assert following.metrics["socflower-alpha"] == pytest.approx([np.mean(alphas)], abs=1e-5)
    assert np.mean(alphas) < 1.0 - 1e-6


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), norm=st.booleans())
def test_the_int8_rule_ends_in_what_the_npus_trained(sizes: list[int], norm: bool) -> None:
    """gamma = 0: of the FP32 model nothing is left, running statistics included."""
    steps, ours = batches(3, sizes), network(norm=norm)
    run(merging(CoarseBackend, "int8"), ours, steps)
    merged: dict[str, Tensor] = {}
    for member, size in enumerate(sizes):
        backend = CoarseBackend()
        model = network(norm=norm)
        backend.build(model, (1, 6, 6))
        backend.load_weights(
            {name: value.numpy() for name, value in model.state_dict().items()}, seed=0
        )
        for parts in steps:
            inputs, labels = parts[member]
            images = inputs.numpy().astype(np.float32)
            backend.train_step(images, labels.numpy(), learning_rate=0.1, progress=0.0)
        for name, value in backend.weights().items():
            own = torch.from_numpy(np.array(value)).double() * size / sum(sizes)
            merged[name] = merged.get(name, 0.0) + own
    for name, value in ours.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), merged[name], rtol=1e-5, atol=1e-6)


def test_a_member_without_samples_for_its_npu_does_not_pull_back() -> None:
    """At gamma near 1 a batch of 2 leaves the NPU nothing, and its copy is that of the session's start."""
    steps = batches(4, (2,))
    ours, reference = network(), network()
    run(merging(npu_ratio=0.1), ours, steps)
    run(FP32Trainer(optimizer=sgd(0.1, 0.0)), reference, steps)
    assert_equal(ours, reference)


def test_a_step_that_is_repeated_trains_a_copy_once() -> None:
    models = []
    for repeats in (1, 3):
        model = network()
        session = merging().start(model, TrainingSpan(total_steps=12))
        for parts in batches(3, (12,)):
            for _ in range(repeats):
                session.gradients(parts, 12)
            session.apply()
        session.finish()
        models.append(model)
    assert_equal(*models)


def test_members_that_compute_one_by_one_train_as_the_group() -> None:
    """As `GroupSum` and a ring do: gradients by member, weighed by the CPUs' samples of the batch."""
    together, apart = network(), network()
    steps = batches(3, (8, 5))
    run(merging(), together, steps)
    session = merging().start(apart, TrainingSpan(num_members=2, total_steps=12))
    for first, second in steps:
        alone = [[first, (first[0][:0], first[1][:0])], [(first[0][:0], first[1][:0]), second]]
        total = sum(session.batch_weight(parts) or 0.0 for parts in alone)
        sums = [torch.zeros_like(parameter) for parameter in apart.parameters()]
        for parts in alone:
            session.gradients(parts, 13, lambda total=total: total)
            for own, parameter in zip(sums, apart.parameters(), strict=True):
                own += parameter.grad
        for own, parameter in zip(sums, apart.parameters(), strict=True):
            parameter.grad = own
        session.apply()
    session.finish()
    assert_close(together, apart)


# ------------------------------------------------------------------------------------------ mistakes, failures
def test_an_accelerator_that_only_computes_gradients_is_refused() -> None:
    trainer = merging(NativeInt8Backend)
    refused(lambda: run(trainer, network(), batches(1, (4,))), "merge", "NITI")
    run(merging(partial(NativeInt8Backend, NITI)), network(), batches(1, (4,)))
    run(merging(None), network(), batches(1, (4,)))
    refused(lambda: merging(merge="logits"), "merge", "'logits'")


@pytest.mark.parametrize("way", ["train_step", "NaN loss", "weights", "infinite gradient"])
def test_of_a_copy_that_fails_nothing_is_merged(way: str) -> None:
    """The model is what the CPU trained, and the reply says so."""
    steps, ours = batches(3, (12,)), network()
    _, end = run(merging(fails_once(way, 0), "half"), ours, steps)
    (event,) = end.events
    assert "nothing of its int8 model is merged" in event
    assert all(bool(torch.isfinite(value).all()) for value in ours.state_dict().values())
    trained, by_cpu = copy.deepcopy(ours), network()
    run(FP32Trainer(optimizer=sgd(0.1, 0.0)), by_cpu, [cpu for cpu, _ in parts_for(steps, "half")])
    _, following = run(merging(rule="half"), ours, steps[:1], end.state, first_step=3)
    assert following.events == () and following.metrics["cpu-share"] == 0.5
    if way == "weights":
        assert_close(trained, by_cpu)


def test_of_an_accelerator_that_cannot_be_built_all_samples_go_to_the_cpu() -> None:
    ours, reference = network(), network()
    _, end = run(merging(fails_once("build", 0)), ours, batches(3, (12,)))
    assert "build failed on purpose" in end.events[0]
    run(FP32Trainer(optimizer=sgd(0.1, 0.0)), reference, batches(3, (12,)))
    assert_equal(ours, reference)
