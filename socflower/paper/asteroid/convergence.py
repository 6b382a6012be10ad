"""Fig. 14: time to a target accuracy, with a network that reaches it here in a minute, trained by each system's rules.

All synchronous systems have the gradient of the whole mini-batch, so that one training gives their accuracy after each
update. HetPipe's gradients are taken at the stale weights that its virtual workers have (`wave_synchronous`), which
depend on the model and the environment that its virtual time is of. All train LeNet-5 on CIFAR-10 by plain SGD, for
which HetPipe's convergence is proved, from the same weights, with the same mini-batches and at the rate that is best
for synchronous training. An epoch then takes the virtual seconds of the paper's model.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from statistics import fmean

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
from socflower.paper.records import read_paper
from socflower.pipeline.plan import TwoDPlan
from socflower.pipeline.planner.peers import compare
from socflower.pipeline.planner.selection import plan_pipeline
from socflower.pipeline.profiler.estimates import pipeline_problem
from socflower.pipeline.runtime.group import train_pipeline
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import GroupTask
from socflower.workloads import DataSet, LabelledData, evaluate, load_data
from socflower.workloads.models import build_model

CASES = tuple(
    (model, environment)
    for model in ("efficientnet-b1", "mobilenet-v2")
    for environment in ("B", "C")
)
SYNCHRONOUS = ("eddl", "pipedream", "dapple")
_MBPS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained."""

    data: str
    num_train: int  # the first of the training samples
    num_test: int
    batch_size: int
    learning_rate: float
    target: (
        float  # mean accuracy of the last `window` evaluations: a single one varies by some percent
    )
    max_epochs: int
    model: str = "lenet5"
    evaluations: int = 8  # an epoch
    window: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def updates_per_epoch(self) -> int:
        """Whole mini-batches of an epoch."""
        return self.num_train // self.batch_size

    def samples(self) -> tuple[LabelledData, LabelledData]:
        """Return training and test samples; raises what `load_data` does."""
        found: DataSet = load_data(self.data)
        return found.train.select(range(self.num_train)), found.test.select(range(self.num_test))

    def rows(self, update: int, seed: int) -> NDArray[np.int64]:
        """Return the samples of a mini-batch: each epoch has all of them in an order of its own."""
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
"""Some minutes of one core for all systems and seeds. Of the rates 0.05, 0.1 and 0.2, synchronous training is best
after two epochs with this one."""


def figure_14(task: Task = FIGURE_14) -> Mapping[str, float | bool | str]:
    """Return epochs to the target, Asteroid's hours, and how much longer than Asteroid each other system takes.

    HetPipe is left out of ranges where its plan exceeds a board's memory, or it does not reach the target.
    """
    most_waves = task.updates_per_epoch * task.max_epochs
    try:
        epochs = mean_epochs(task, synchronous_waves(most_waves))
        stale = {
            case: None
            if (own := hetpipe_waves(*case, most_waves)) is None
            else (own, mean_epochs(task, own), fresh_epochs(task, own))
            for case in CASES
        }
    except DataUnavailable:
        return dict.fromkeys(
            (cell.key for cell in read_paper("asteroid").item("figure-14").cells),
            f"{task.data} is not here",
        )
    assert epochs is not None, f"synchronous training must reach {task.target}"
    found: dict[str, float | bool | str] = {"synchronous, epochs": epochs}
    ratios, more, more_than_fresh = [], [], []
    for case in CASES:
        key, samples = "/".join(case), EPOCH_SAMPLES[case[0]]
        ours_s = epochs * samples / asteroid(*case, _MBPS).prediction.samples_per_s
        found[f"{key}/asteroid"] = ours_s / 3600.0
        for system in SYNCHRONOUS:
            other = peer(system, *case, _MBPS)
            found[f"{key}/{system}"] = NO_FIT
            if other.fits and other.prediction is not None:
                found[f"{key}/{system}"] = ratio = (
                    epochs * samples / other.prediction.samples_per_s / ours_s
                )
                ratios.append(ratio)
        found |= dict.fromkeys(
            (f"{key}/hetpipe", f"{key}/hetpipe, epochs", f"{key}/fresh, epochs"), NO_FIT
        )
        trained = stale[case]
        if trained is not None:
            own, needed, fresh = trained
            more.append(needed is None or needed > epochs)
            more_than_fresh.append(fresh is not None and (needed is None or needed > fresh))
            never = f"over {task.max_epochs}"
            found |= {
                f"{key}/hetpipe": "never",
                f"{key}/hetpipe, epochs": never,
                f"{key}/fresh, epochs": never if fresh is None else fresh,
            }
            if needed is not None:
                ratio = needed * samples / MINI_BATCH[case[0]] * own.wave_s / ours_s
                found |= {f"{key}/hetpipe": ratio, f"{key}/hetpipe, epochs": needed}
                ratios.append(ratio)
    return {
        **found,
        "least over the baselines": min(ratios),
        "most over the baselines": max(ratios),
        "synchronous methods need as many epochs": synchronous_error(task) < 1e-4,
        "hetpipe needs more epochs": all(more) if more else NO_FIT,
        "hetpipe needs more epochs than fresh updates": all(more_than_fresh) if more else NO_FIT,
    }


def synchronous_error(task: Task, num_updates: int = 3) -> float:
    """Return how far weights that plans of different systems train are from those of one device, by its largest weight.

    The plans are those of the systems for the task's own model on environment B, each device of which computes its part
    (`pipeline.runtime`).
    """
    train, _ = task.samples()
    module = _model_of(task, train, 0)
    problem = pipeline_problem(
        module,
        tuple(train.inputs.shape[1:]),
        cluster_of(ENVIRONMENTS["B"], _MBPS),
        batch_size=task.batch_size,
    )
    plans = [
        own.plan
        for own in compare(problem, ("single-device", *SYNCHRONOUS))
        if own.plan is not None
    ]
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
    return max(
        float((each - weights[0]).abs().max() / weights[0].abs().max()) for each in weights[1:]
    )


@cache
def hetpipe_waves(model: str, environment: str, num_waves: int) -> Waves | None:
    """Return the events of HetPipe's plan for a model of the paper; None if it exceeds a board's memory."""
    found = peer("hetpipe", model, environment, _MBPS)
    if not found.fits or not isinstance(found.plan, TwoDPlan):
        return None
    return waves_of(found.problem, found.plan, num_waves)


def synchronous_waves(num_waves: int) -> Waves:
    """Return the events of one worker with one minibatch in flight: plain SGD."""
    kinds = (Kind.ENTER, Kind.LEAVE, Kind.PUSH, Kind.PULL, Kind.TAKE)
    return Waves(
        moments=tuple(
            Moment(float(wave), kind, 0, wave + (kind in (Kind.PULL, Kind.TAKE)))
            for wave in range(num_waves)
            for kind in kinds
        ),
        wave_s=1.0,
        num_minibatches=1,
        parts=(1.0,),
    )


def fresh_epochs(task: Task, waves: Waves) -> float | None:
    """Return the mean epochs to the target with as many updates a mini-batch as all workers make, none of them stale.

    They are one worker's, of smaller mini-batches at a rate in proportion.
    """
    size = max(1, task.batch_size // (waves.num_minibatches * len(waves.parts)))
    finer = replace(
        task, batch_size=size, learning_rate=task.learning_rate * size / task.batch_size
    )
    return mean_epochs(finer, synchronous_waves(finer.updates_per_epoch * finer.max_epochs))


def mean_epochs(task: Task, waves: Waves) -> float | None:
    """Return the mean of the seeds' epochs to the target; None if one does not reach it.

    Results are kept by the order of events, which the plans of several models may share.
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

    Weights and gradients are vectors of all parameters (n,). `module` has no buffers, whose values would depend on who
    computed last; it is used for one gradient at a time. `parts` are the workers' parts of each mini-batch.
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
        self._gradients: dict[tuple[int, int], Tensor] = {}  # of minibatches in flight
        self._waves: dict[
            tuple[int, int], Tensor
        ] = {}  # sums of those that have left, until the server has them
        self._pulled: dict[int, Tensor] = {}
        self._num_pushed = [0 for _ in parts]

    @property
    def num_updates(self) -> int:
        """Mini-batches that the server has from all workers."""
        return min(self._num_pushed)

    def apply(self, kind: Kind, worker: int, number: int) -> None:
        """Let an event happen."""
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
        """Return the samples of a worker's minibatch: its part of its worker's part of a mini-batch."""
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
        loss = functional.cross_entropy(self._module(inputs), labels) * (
            len(rows) / self._task.batch_size
        )
        return parameters_to_vector(torch.autograd.grad(loss, self._parameters))


@cache
def _order(num_samples: int, epoch: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
