"""Trainings of Fig. 14: plain SGD as the case without staleness, and stale weights by their definition."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from socflower.errors import DataUnavailable
from socflower.paper.asteroid import convergence
from socflower.paper.asteroid.convergence import (
    CASES,
    FIGURE_14,
    Task,
    WaveTraining,
    figure_14,
    fresh_epochs,
    mean_epochs,
    synchronous_error,
    synchronous_waves,
)
from socflower.paper.asteroid.wave_synchronous import Kind, Waves, waves_of
from socflower.paper.comparison import compare_item, read_paper
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data
from tests.paper.test_wave_synchronous import two_workers

TASK = Task(
    data="digits",
    num_train=320,
    num_test=200,
    batch_size=32,
    learning_rate=0.1,
    target=0.5,
    max_epochs=8,
    evaluations=2,
    window=1,
    seeds=(0, 1),
)
UPDATES = 6


def network() -> nn.Module:
    return build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=0)


def digits() -> LabelledData:
    return load_data("digits").train.select(range(TASK.num_train))


def trained(waves: Waves, seed: int = 0) -> WaveTraining:
    """Train until the server has `UPDATES` mini-batches."""
    found = WaveTraining(network(), digits(), TASK, waves.num_minibatches, waves.parts, seed)
    for _, kind, worker, number in waves.moments:
        found.apply(kind, worker, number)
        if found.num_updates == UPDATES:
            break
    return found


def plain_sgd(seed: int = 0) -> Tensor:
    """Return the weights of torch's SGD, of one device."""
    module, data = network(), digits()
    optimizer = torch.optim.SGD(module.parameters(), lr=TASK.learning_rate)
    for update in range(UPDATES):
        inputs, labels = data.batch(torch.from_numpy(TASK.rows(update, seed)))
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    return parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("simulated", [False, True])
def test_one_worker_with_one_minibatch_in_flight_is_plain_sgd_bit_for_bit(simulated: bool) -> None:
    case, plan = two_workers()
    alone = waves_of(case, replace(plan, groups=plan.groups[:1]), UPDATES, num_minibatches=1)
    found = trained(alone if simulated else synchronous_waves(UPDATES))
    torch.testing.assert_close(found.server, plain_sgd(), rtol=0.0, atol=0.0)
    assert torch.equal(trained(synchronous_waves(UPDATES), 1).server, plain_sgd(1))


def test_workers_without_staleness_compute_the_synchronous_update() -> None:
    """With Nm = 1 and D = 0 each wave waits for all waves before it."""
    found = trained(waves_of(*two_workers(1.7), UPDATES, num_minibatches=1))
    torch.testing.assert_close(found.server, plain_sgd(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("minibatches", "max_ahead"), [(3, 0), (2, 1)])
def test_stale_gradients_are_those_at_the_weights_that_wsp_defines(
    minibatches: int, max_ahead: int
) -> None:
    """The reference takes all updates that a minibatch has seen by name and sums them up from the first weights."""
    waves = waves_of(*two_workers(1.7), UPDATES, num_minibatches=minibatches, max_ahead=max_ahead)
    found, module, data = trained(waves), network(), digits()
    first = parameters_to_vector(module.parameters()).detach().clone()
    gradients: dict[tuple[int, int], Tensor] = {}
    left, server, pulled = [0, 0], [0, 0], {}
    # Waves at the server when the worker last took its weights.
    seen: list[Sequence[int]] = [(0, 0), (0, 0)]

    def weights(counts: Sequence[int]) -> Tensor:
        known = [(worker, number) for worker in (0, 1) for number in range(counts[worker])]
        return first - TASK.learning_rate * sum(gradients[one] for one in known)

    def gradient(counts: Sequence[int], rows: np.ndarray) -> Tensor:
        vector_to_parameters(weights(counts), module.parameters())
        inputs, labels = data.batch(torch.from_numpy(rows))
        total = functional.cross_entropy(module(inputs), labels, reduction="sum")
        own = torch.autograd.grad(total / TASK.batch_size, list(module.parameters()))
        return parameters_to_vector(own)

    stale = 0
    for _, kind, worker, number in waves.moments:
        if kind == Kind.LEAVE:
            left[worker] += 1
        elif kind == Kind.PUSH:
            server[worker] += 1
        elif kind == Kind.PULL:
            pulled[worker] = tuple(server)
        elif kind == Kind.TAKE:
            seen[worker] = pulled[worker]
        else:
            counts = [count * minibatches for count in seen[worker]]
            counts[worker] = left[worker]
            stale += counts[worker] < number
            gradients[worker, number] = gradient(counts, found.rows(worker, number))
        if min(server) == UPDATES:
            break
    assert stale > UPDATES
    expected = weights([count * minibatches for count in server])
    torch.testing.assert_close(found.server, expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found.server, plain_sgd(), rtol=1e-3, atol=1e-4)


def test_a_wave_of_all_workers_is_a_mini_batch_and_an_epoch_has_every_sample_once() -> None:
    training = WaveTraining(network(), digits(), TASK, 3, (0.3, 0.7), 0)
    for wave in range(3):
        numbers = range(3 * wave, 3 * wave + 3)
        rows = [training.rows(worker, number) for worker in (0, 1) for number in numbers]
        np.testing.assert_array_equal(np.concatenate(rows), TASK.rows(wave, 0))
    epoch = np.concatenate([TASK.rows(update, 0) for update in range(TASK.updates_per_epoch)])
    assert sorted(epoch) == list(range(TASK.num_train))


def test_epochs_to_the_target_depend_on_seeds_alone_and_on_nothing_if_it_is_not_reached() -> None:
    waves = synchronous_waves(TASK.updates_per_epoch * TASK.max_epochs)
    found = mean_epochs(TASK, waves)
    convergence._epochs.cache_clear()
    assert found is not None and 0.5 < found <= TASK.max_epochs
    assert found == mean_epochs(TASK, waves)
    beyond = replace(TASK, target=1.1, max_epochs=1)
    assert mean_epochs(beyond, synchronous_waves(TASK.updates_per_epoch)) is None


def test_fresh_updates_are_those_of_smaller_mini_batches_at_a_smaller_rate() -> None:
    toy = waves_of(*two_workers(), 10, num_minibatches=2)
    finer = replace(TASK, batch_size=8, learning_rate=0.025)
    expected = mean_epochs(finer, synchronous_waves(finer.updates_per_epoch * finer.max_epochs))
    assert fresh_epochs(TASK, toy) == expected is not None


@pytest.mark.slow
def test_plans_of_all_systems_train_the_weights_of_one_device() -> None:
    assert synchronous_error(TASK, 2) < 1e-5


@pytest.mark.slow
def test_the_figure_has_every_cell_and_its_ratios_follow_from_epochs_and_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With toy waves in place of HetPipe's of the paper's models, of which one does not fit."""
    waves = waves_of(*two_workers(1.7), TASK.updates_per_epoch * TASK.max_epochs)
    toys = {case: waves for case in CASES if case != ("mobilenet-v2", "B")}
    monkeypatch.setattr(convergence, "hetpipe_waves", lambda *arguments: toys.get(arguments[:2]))
    monkeypatch.setitem(figure_14.__globals__, "asteroid", Priced)
    monkeypatch.setitem(figure_14.__globals__, "peer", lambda system, *case: Priced(*case, 2.0))
    found = figure_14(TASK)
    assert {cell.key for cell in read_paper("asteroid").item("figure-14").cells} == found.keys()
    assert found["mobilenet-v2/B/hetpipe"] == "out of memory"
    assert found["mobilenet-v2/B/fresh, epochs"] == "out of memory"
    assert found["mobilenet-v2/B/dapple"] == pytest.approx(2.0)
    ours_s = found["synchronous, epochs"] * 2048 / 1000.0
    ratio = found["mobilenet-v2/C/hetpipe, epochs"] * waves.wave_s / ours_s
    assert found["mobilenet-v2/C/hetpipe"] == pytest.approx(ratio)
    assert found["least over the baselines"] == pytest.approx(2.0)
    assert found["most over the baselines"] == found["mobilenet-v2/C/hetpipe"]


class Priced:
    """A plan that trains 1,000 samples a second, or fewer."""

    fits = True

    def __init__(self, model: str, environment: str, mbps: float, slower: float = 1.0) -> None:
        self.prediction = self
        self.samples_per_s = 1000.0 / slower


def test_without_its_data_the_figure_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise DataUnavailable(f"data {name}: not found")

    monkeypatch.setattr(convergence, "load_data", missing)
    convergence._epochs.cache_clear()
    paper = read_paper("asteroid")
    rows = compare_item(paper, paper.item("figure-14"))
    assert {(row.ours, row.holds) for row in rows} == {("cifar10 is not here", None)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_figure_14_with_real_trainings() -> None:
    found = figure_14(FIGURE_14)
    assert 0.5 < float(found["synchronous, epochs"]) < FIGURE_14.max_epochs
    assert found["synchronous methods need as many epochs"] is True
    assert float(found["least over the baselines"]) > 0.9
