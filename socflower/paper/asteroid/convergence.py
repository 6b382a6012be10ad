"""Fig. 14: time to a target accuracy, with a network that reaches it here in a minute, trained by each system's rules.

All synchronous systems have the gradient of the whole mini-batch, so one training gives the accuracy of all of them
after each update. HetPipe's gradients are taken at the stale weights of its virtual workers (`wave_synchronous`), which
depend on the model and the environment. All systems train LeNet-5 on CIFAR-10 by plain SGD, for which HetPipe's
convergence is proved, from the same weights, with the same mini-batches and at the best rate for synchronous training.
An epoch then takes the virtual seconds of the paper's model.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from socflower.errors import DataUnavailable
from socflower.hierarchy import split_batch
from socflower.paper.asteroid.methods import NO_FIT, asteroid, peer
from socflower.paper.asteroid.settings import ENVIRONMENTS, EPOCH_SAMPLES, MINI_BATCH, cluster_of
from socflower.paper.asteroid.wave_synchronous import Kind, Moment, Waves, waves_of
from socflower.paper.comparison import read_paper
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.planner.baselines import compare
from socflower.pipeline.planner.selection import plan_pipeline
from socflower.pipeline.profiler.module_problem import pipeline_problem
from socflower.pipeline.runtime.group import train_pipeline
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import GroupTask
from socflower.workloads.dataset import DataSet, LabelledData
from socflower.workloads.evaluation import evaluate
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

CASES = tuple(
    (model, environment)
    for model in ("efficientnet-b1", "mobilenet-v2")
    for environment in ("B", "C")
)
SYNCHRONOUS = ("eddl", "pipedream", "dapple")
_MBPS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A training task."""

    data: str
    # The first of the training and of the test samples.
    num_train: int
    num_test: int
    batch_size: int
    learning_rate: float
    # Mean accuracy of the last `window` evaluations, since a single one varies by some percent.
    target: float
    max_epochs: int
    model: str = "lenet5"
    # Per epoch.
    evaluations: int = 8
    window: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def updates_per_epoch(self) -> int:
        """Whole mini-batches of an epoch."""
        return self.num_train // self.batch_size

    @property
    def most_waves(self) -> int:
        """Mini-batches of the longest training."""
        return self.updates_per_epoch * self.max_epochs

    def samples(self) -> tuple[LabelledData, LabelledData]:
        """Return training and test samples; raises what `load_data` does."""
        found: DataSet = load_data(self.data)
        return found.train.select(range(self.num_train)), found.test.select(range(self.num_test))

    def rows(self, update: int, seed: int) -> NDArray[np.int64]:
        """Return the samples of a mini-batch; each epoch has its own order of all samples."""
        epoch, number = divmod(update, self.updates_per_epoch)
        order = _order(self.num_train, epoch, seed)
        return order[number * self.batch_size : (number + 1) * self.batch_size]


FIGURE_14 = Task(
    data="cifar10",
    num_train=50_000,
    num_test=4000,
    batch_size=128,
    learning_rate=0.1,
    target=0.45,
    max_epochs=6,
)
"""It takes some minutes of one core for all systems and seeds. The rate 0.1 is the best of 0.05, 0.1 and 0.2 for
synchronous training after two epochs."""


def figure_14(task: Task = FIGURE_14) -> Mapping[str, float | bool | str]:
    """Return epochs to the target, Asteroid's hours, and each other system's time over Asteroid's.

    HetPipe is left out of ranges if its plan exceeds a board's memory or it does not reach the target.
    """
    try:
        epochs = mean_epochs(task, synchronous_waves(task.most_waves))
        stale = {case: _stale(task, hetpipe_waves(*case, task.most_waves)) for case in CASES}
    except DataUnavailable:
        keys = [cell.key for cell in read_paper("asteroid").item("figure-14").cells]
        return dict.fromkeys(keys, f"{task.data} is not here")
    assert epochs is not None, f"synchronous training must reach {task.target}"
    found: dict[str, float | bool | str] = {"synchronous, epochs": epochs}
    ratios: list[float] = []
    for case in CASES:
        epoch_samples = EPOCH_SAMPLES[case[0]]
        ours_s = epochs * epoch_samples / asteroid(*case, _MBPS).prediction.samples_per_s
        cells: dict[str, Any] = {"asteroid": ours_s / 3600.0}
        for system in SYNCHRONOUS:
            other = peer(system, *case, _MBPS)
            cells[system] = NO_FIT
            if other.fits and other.prediction is not None:
                theirs_s = epochs * epoch_samples / other.prediction.samples_per_s
                cells[system] = theirs_s / ours_s
                ratios.append(theirs_s / ours_s)
        trained = stale[case]
        cells |= _hetpipe_cells(task, trained)
        if trained is not None and trained.epochs is not None:
            num_waves = trained.epochs * epoch_samples / MINI_BATCH[case[0]]
            cells["hetpipe"] = num_waves * trained.wave_s / ours_s
            ratios.append(cells["hetpipe"])
        found |= {f"{'/'.join(case)}/{key}": value for key, value in cells.items()}
    fitting = [each for each in stale.values() if each is not None]
    suffers = [each.suffers_from_staleness for each in fitting]
    slower = [each.epochs is None or each.epochs > epochs for each in fitting]
    return {
        **found,
        "least over the baselines": min(ratios),
        "most over the baselines": max(ratios),
        "synchronous methods need as many epochs": synchronous_error(task) < 1e-4,
        "hetpipe needs more epochs": all(slower) if fitting else NO_FIT,
        "hetpipe needs more epochs than fresh updates": all(suffers) if fitting else NO_FIT,
    }


class _Stale(NamedTuple):
    """HetPipe's training: epochs to the target, None if it is not reached, and those of equally many fresh updates."""

    wave_s: float
    epochs: float | None
    fresh_epochs: float | None

    @property
    def suffers_from_staleness(self) -> bool:
        """Whether fresh updates reach the target earlier."""
        if self.fresh_epochs is None:
            return False
        return self.epochs is None or self.epochs > self.fresh_epochs


def _stale(task: Task, waves: Waves | None) -> _Stale | None:
    if waves is None:
        return None
    return _Stale(waves.wave_s, mean_epochs(task, waves), fresh_epochs(task, waves))


def _hetpipe_cells(task: Task, trained: _Stale | None) -> dict[str, Any]:
    if trained is None:
        return dict.fromkeys(("hetpipe", "hetpipe, epochs", "fresh, epochs"), NO_FIT)
    never = f"over {task.max_epochs}"
    return {
        "hetpipe": "never",
        "hetpipe, epochs": never if trained.epochs is None else trained.epochs,
        "fresh, epochs": never if trained.fresh_epochs is None else trained.fresh_epochs,
    }


def synchronous_error(task: Task, num_updates: int = 3) -> float:
    """Return the largest error of the weights that the systems' plans train, relative to one device's largest weight.

    The plans are for the task's own model on environment B, and all devices compute their parts (`pipeline.runtime`).
    """
    train, _ = task.samples()
    module = _model_of(task, train, 0)
    problem = pipeline_problem(
        module,
        tuple(train.inputs.shape[1:]),
        cluster_of(ENVIRONMENTS["B"], _MBPS),
        batch_size=task.batch_size,
    )
    systems = compare(problem, ("single-device", *SYNCHRONOUS))
    plans = [system.plan for system in systems if system.plan is not None]
    plans.append(plan_pipeline(problem).plan)
    work = GroupTask(
        group_id=0,
        num_groups=1,
        members=(0,),
        leader=0,
        partitions=(0,),
        num_partitions=1,
        capacities=(1.0,),
        first_step=0,
        num_steps=num_updates,
        steps_per_epoch=task.updates_per_epoch,
        total_steps=num_updates,
        batch_size=task.batch_size,
        reshuffle=True,
        deal_epoch=0,
        seed=0,
        num_samples=len(train),
    )
    trainer = FP32Trainer(optimizer=sgd(task.learning_rate, momentum=0.0), device="cpu")
    weights = []
    for plan in plans:
        own = copy.deepcopy(module)
        train_pipeline(own, train, work, plan, trainer)
        weights.append(parameters_to_vector(own.parameters()).detach())
    alone, *others = weights
    return max(float((each - alone).abs().max() / alone.abs().max()) for each in others)


@cache
def hetpipe_waves(model: str, environment: str, num_waves: int) -> Waves | None:
    """Return the events of HetPipe's plan for a model of the paper; None if the plan exceeds a board's memory."""
    found = peer("hetpipe", model, environment, _MBPS)
    if not found.fits or not isinstance(found.plan, TwoDPlan):
        return None
    return waves_of(found.problem, found.plan, num_waves)


def synchronous_waves(num_waves: int) -> Waves:
    """Return the events of one worker with one minibatch in flight: plain SGD."""
    kinds = (Kind.ENTER, Kind.LEAVE, Kind.PUSH, Kind.PULL, Kind.TAKE)
    moments = [
        Moment(float(wave), kind, 0, wave + (kind in (Kind.PULL, Kind.TAKE)))
        for wave in range(num_waves)
        for kind in kinds
    ]
    return Waves(
        moments=tuple(moments),
        wave_s=1.0,
        num_minibatches=1,
        parts=(1.0,),
    )


def fresh_epochs(task: Task, waves: Waves) -> float | None:
    """Return the mean epochs to the target with HetPipe's number of updates per mini-batch, none of them stale.

    One worker makes the updates, with smaller mini-batches and a rate in proportion.
    """
    size = max(1, task.batch_size // (waves.num_minibatches * len(waves.parts)))
    rate = task.learning_rate * size / task.batch_size
    finer = replace(task, batch_size=size, learning_rate=rate)
    return mean_epochs(finer, synchronous_waves(finer.most_waves))


def mean_epochs(task: Task, waves: Waves) -> float | None:
    """Return the mean of the seeds' epochs to the target; None if a seed does not reach it.

    Results are cached by the order of events, which the plans of several models may share.
    """
    order = tuple(moment[1:] for moment in waves.moments)
    epochs = [_epochs(task, order, waves.num_minibatches, waves.parts, seed) for seed in task.seeds]
    reached = [each for each in epochs if each is not None]
    return fmean(reached) if len(reached) == len(epochs) else None


@cache
def _epochs(
    task: Task,
    order: tuple[tuple[Kind, int, int], ...],
    num_minibatches: int,
    parts: tuple[float, ...],
    seed: int,
) -> float | None:
    train, test = task.samples()
    training = WaveTraining(_model_of(task, train, seed), train, task, num_minibatches, parts, seed)
    every = max(1, task.updates_per_epoch // task.evaluations)
    evaluated = 0
    accuracies: deque[float] = deque(maxlen=task.window)
    for kind, worker, number in order:
        training.apply(kind, worker, number)
        if kind == Kind.PUSH and (done := training.num_updates) >= evaluated + every:
            evaluated = done
            accuracies.append(evaluate(training.module_at_server(), test, batch_size=500).accuracy)
            if len(accuracies) == task.window and fmean(accuracies) >= task.target:
                return done / task.updates_per_epoch
    return None


def _model_of(task: Task, data: LabelledData, seed: int) -> nn.Module:
    channels, size = data.inputs.shape[1:3]
    return build_model(
        task.model, in_channels=channels, image_size=size, num_classes=data.num_classes, seed=seed
    )


class WaveTraining:
    """Weights of all virtual workers and of the server, which events change one after the other.

    Weights and gradients are vectors of all parameters (n,). All workers share `module`, so it has no buffers: their
    values would depend on the order of workers. `parts` are the workers' parts of each mini-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        data: LabelledData,
        task: Task,
        num_minibatches: int,
        parts: Sequence[float],
        seed: int,
    ) -> None:
        assert not list(module.buffers()), "a model without buffers"
        self._module, self._data, self._task, self._seed = module.train(), data, task, seed
        self._num_minibatches = num_minibatches
        self._sizes = split_batch(task.batch_size, parts)
        self._parameters = list(module.parameters())
        self.server = parameters_to_vector(self._parameters).detach().clone()
        self.local = [self.server.clone() for _ in parts]
        # Of minibatches in flight.
        self._gradients: dict[tuple[int, int], Tensor] = {}
        # Sums of the gradients that have left, until the server has them.
        self._waves: dict[tuple[int, int], Tensor] = {}
        self._pulled: dict[int, Tensor] = {}
        self._num_pushed = [0 for _ in parts]

    @property
    def num_updates(self) -> int:
        """Mini-batches that the server has from all workers."""
        return min(self._num_pushed)

    def apply(self, kind: Kind, worker: int, number: int) -> None:
        """Apply an event."""
        rate = self._task.learning_rate
        if kind == Kind.ENTER:
            self._gradients[worker, number] = self._gradient(worker, number)
        elif kind == Kind.LEAVE:
            gradient, wave = self._gradients.pop((worker, number)), number // self._num_minibatches
            self.local[worker].add_(gradient, alpha=-rate)
            known = self._waves.get((worker, wave))
            self._waves[worker, wave] = gradient if known is None else known.add_(gradient)
        elif kind == Kind.PUSH:
            self.server.add_(self._waves.pop((worker, number)), alpha=-rate)
            self._num_pushed[worker] += 1
        elif kind == Kind.PULL:
            self._pulled[worker] = self.server.clone()
        else:
            own = self.local[worker] = self._pulled.pop(worker)
            unfinished = self._waves.get((worker, number))
            if unfinished is not None:
                own.add_(unfinished, alpha=-rate)

    def module_at_server(self) -> nn.Module:
        """Return the module with the server's weights, until the next event."""
        vector_to_parameters(self.server.clone(), self._parameters)
        return self._module

    def rows(self, worker: int, number: int) -> NDArray[np.int64]:
        """Return the samples of a worker's minibatch, which is a part of the worker's part of a mini-batch."""
        wave, position = divmod(number, self._num_minibatches)
        bounds = [0, *accumulate(self._sizes)]
        own = self._task.rows(wave, self._seed)[bounds[worker] : bounds[worker + 1]]
        return np.array_split(own, self._num_minibatches)[position]

    def _gradient(self, worker: int, number: int) -> Tensor:
        """Return a minibatch's part of the mean gradient of its mini-batch, at the worker's weights."""
        rows = self.rows(worker, number)
        if not len(rows):
            return torch.zeros_like(self.server)
        vector_to_parameters(self.local[worker], self._parameters)
        inputs, labels = self._data.batch(torch.from_numpy(rows))
        mean = functional.cross_entropy(self._module(inputs), labels)
        loss = mean * (len(rows) / self._task.batch_size)
        return parameters_to_vector(torch.autograd.grad(loss, self._parameters))


@cache
def _order(num_samples: int, epoch: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
