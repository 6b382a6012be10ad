"""Makes a Flower ClientApp from a model function and a data function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn
from torch.utils.data import DataLoader, Dataset

from socflower.clients.group_work import train_whole_group
from socflower.clients.local_work import train_alone
from socflower.clients.node_record import record_mod
from socflower.clients.node_training import (
    CheckedTrainer,
    NodeTraining,
    SourceFn,
    StateFolderFn,
    device_name,
    load_sent,
    partition_of,
)
from socflower.clients.privacy_mods import adapt_mod
from socflower.clients.ring_client import answer_query
from socflower.clients.ring_work import train_as_member
from socflower.clients.settings import MessageConfig, ReadSettings
from socflower.errors import ConfigError
from socflower.flower_adapter import has_mods
from socflower.model_graph.random_state import build_exclusively
from socflower.model_graph.torch_device import AUTO
from socflower.plain_numbers import plain_numbers
from socflower.training.fp32 import FP32Trainer
from socflower.training.trainer import Trainer, torch_threads
from socflower.wire.message_keys import (
    CONFIG,
    EVALUATED,
    GROUP,
    METRICS,
    NUM_EXAMPLES,
    QUERY_ACTION,
    RING,
)
from socflower.wire.split_message_keys import SPLIT
from socflower.workloads.data_source import DataSource
from socflower.workloads.evaluation import EvaluationStep, EvaluationWeight, evaluate
from socflower.workloads.map_dataset import as_data_source

ModelFn: TypeAlias = Callable[[Context], nn.Module]
DataFn: TypeAlias = Callable[[Context, int, int], DataSource | Dataset[Any] | DataLoader[Any]]
TrainerFn: TypeAlias = (
    Callable[[Context], Trainer] | Callable[[Context, Mapping[str, Any]], Trainer]
)


@plain_numbers
def make_client_app(
    model_fn: ModelFn,
    data_fn: DataFn,
    trainer: Trainer | TrainerFn | None = None,
    *,
    evaluate_data_fn: DataFn | None = None,
    evaluate_step: EvaluationStep | None = None,
    evaluate_weight: EvaluationWeight | None = None,
    mods: Sequence[Mod] = (),
    num_threads: int = 1,
    state_folder: StateFolderFn | None = None,
    ring_ledger: StateFolderFn | None = None,
    extra_keys: Sequence[str] = (),
    app: ClientApp | None = None,
) -> ClientApp:
    """Return a ClientApp that trains on its own, or as a whole group if the strategy asks for that.

    Parameters
    ----------
    model_fn : (context) -> nn.Module
        Returns the model; its weights are overwritten by those of the message.
    data_fn : (context, partition_id, num_partitions) -> LabelledData, map-style Dataset or DataLoader
        Returns the training data of one node. A Dataset's samples are (input, label); what is random in them, such as
        augmentation, is a function of seed, epoch and sample. Of a DataLoader dataset, collate function and number of
        workers are used; batch size and order are the training's. For a group it is called for each member; if data are
        re-shuffled it is called as `(context, 0, 1)`, which means all data. Called every round, so a slow source
        should cache.
    trainer : Trainer, or (context) -> Trainer, or (context, config) -> Trainer
        How to train; default `FP32Trainer()`. `config` is the message's train config: keys that the function reads are
        settings of the trainer, such as "lr".
    evaluate_data_fn : same form as `data_fn`, optional
        If given, EVALUATE messages are answered with metrics and `num-examples`, computed on the trainer's device,
        or on the accelerator, if there is one and the trainer depends on the train config.
    evaluate_step : (model, batch) -> dict of metrics, optional
        Means over a batch's samples; by default accuracy and loss of a classifier. See `evaluate`.
    evaluate_weight : (batch) -> float, optional
        What these means divide by, if that is not the batch's number of samples; it is the `num-examples` of the reply.
    mods : sequence of Flower mods
    num_threads : int
        Torch threads of one client; 1 makes results independent of the machine's number of cores.
    state_folder : (context) -> Path or None, optional
        Folder in which a group's leader saves the group's optimiser, besides `context.state`, so that a training can
        be resumed after its processes have ended. One folder per training; None saves nothing.
    ring_ledger : (context) -> Path or None, optional
        On real clusters, a file of this node to which every applied step is appended as a line of JSON.
    extra_keys : sequence of str
        Keys of a message's config, records of a message, or keys of the node config that `mods` or functions of yours
        read. Any other unknown key is refused with `ConfigError`. The keys of Flower's clipping mods are known.
    app : ClientApp, optional
        A ClientApp of yours. Its functions answer messages that are not for a group: TRAIN messages of strategies such
        as FedAvg, and EVALUATE messages if there is no `evaluate_data_fn`. Its mods belong in `mods`.

    Notes
    -----
    A TRAIN message without a group record trains `local-epochs` (default 1) epochs of batches of `batch-size`
    (default 32) on the node's own partition, both from the message's config, with a new optimiser, as FedAvg
    expects. A scheduler continues across rounds if the config has `num-rounds`.
    """
    settings = ReadSettings(maker="make_client_app", mods=mods, extra_keys=extra_keys)
    if app is not None and has_mods(app):
        raise ConfigError(
            "make_client_app: mods of the given app do not see messages for groups; give them to "
            "make_client_app(..., mods=[...])"
        )
    client = _Client(
        model_fn=model_fn,
        data_fn=_as_sources(data_fn),
        trainers=_TrainerMaker(trainer, settings),
        settings=settings,
        num_threads=num_threads,
        state_folder=state_folder,
        ring_ledger=ring_ledger,
        app=app,
    )
    made = ClientApp(mods=[record_mod, *map(adapt_mod, mods)])
    made.query(QUERY_ACTION)(answer_query)
    made.train()(client.train)
    if evaluate_data_fn is not None:
        source = _as_sources(evaluate_data_fn)
        answer = partial(
            client.evaluate, data_fn=source, step=evaluate_step, weight=evaluate_weight
        )
        made.evaluate()(answer)
    elif app is not None:
        made.evaluate()(app)
    return made


def _as_sources(data_fn: DataFn) -> SourceFn:
    """Return a user's `data_fn` with its data in the form that training reads."""
    return lambda context, partition_id, num_partitions: as_data_source(
        data_fn(context, partition_id, num_partitions)
    )


class _TrainerMaker:
    """Makes the trainer of a message, and refuses settings of the train config that nothing reads."""

    def __init__(self, trainer: Trainer | TrainerFn | None, settings: ReadSettings) -> None:
        self._trainer, self._settings = trainer or FP32Trainer(), settings
        self._is_made = hasattr(self._trainer, "start")
        self._takes_config = not self._is_made and _num_required(cast(Any, trainer)) > 1

    def make(self, message: Message, context: Context) -> Trainer:
        config = MessageConfig(message)
        if not self._takes_config:
            self._settings.check_training(message)
            return cast(Trainer, self._trainer) if self._is_made else self._started_with(context)
        # Settings of the trainer are not known yet, so only other records and keys are refused here.
        self._settings.check_training(message, {*config})
        # Functions in the trainer may read the config too, at the latest when the trainer starts.
        return CheckedTrainer(
            self._started_with(context, config),
            lambda: self._settings.check_training(message, config.read),
        )

    def known_device(self, context: Context) -> str | None:
        """Return the name of the trainer's device; None if the trainer depends on a message's train config."""
        if self._takes_config:
            return None
        trainer = cast(Trainer, self._trainer) if self._is_made else self._started_with(context)
        return device_name(trainer)

    def _started_with(self, *arguments: Any) -> Trainer:
        made = cast(Callable[..., Trainer], self._trainer)(*arguments)
        if not hasattr(made, "start"):
            raise ConfigError(
                f"the trainer's function returned {type(made).__name__}; return a trainer, such as "
                "FP32Trainer()"
            )
        return made


def _num_required(function: Callable[..., Any]) -> int:
    """Return how many parameters of a function have no default."""
    parameters = inspect.signature(function).parameters.values()
    return sum(each.default is each.empty for each in parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Client:
    """The arguments of `make_client_app`, and the answers to messages."""

    model_fn: ModelFn
    data_fn: SourceFn
    trainers: _TrainerMaker
    settings: ReadSettings
    num_threads: int
    state_folder: StateFolderFn | None
    ring_ledger: StateFolderFn | None
    app: ClientApp | None

    def train(self, message: Message, context: Context) -> Message:
        """Answer a TRAIN message by the work that its records name; without one the user's app or node trains alone."""
        records = message.content.config_records
        if self.app is not None and not {GROUP, SPLIT} & {*records}:
            return self.app(message, context)
        self.settings.check_node(context)
        if SPLIT in records:
            raise ConfigError(
                "the message is for an edge of a split training; make its ClientApp with "
                "socflower.make_split_client_app"
            )
        work = next((work for name, work in _WORKS.items() if name in records), train_alone)
        trainer = self.trainers.make(message, context)
        with torch_threads(self.num_threads):
            return work(
                NodeTraining(
                    message=message,
                    context=context,
                    model=build_exclusively(self.model_fn, context),
                    trainer=trainer,
                    data_fn=self.data_fn,
                    declared=self.settings.declared,
                    state_folder=self.state_folder,
                    ring_ledger=self.ring_ledger,
                )
            )

    def evaluate(
        self,
        message: Message,
        context: Context,
        *,
        data_fn: SourceFn,
        step: EvaluationStep | None,
        weight: EvaluationWeight | None,
    ) -> Message:
        """Answer an EVALUATE message with metrics on this node's evaluation data."""
        self.settings.check_evaluation(message)
        self.settings.check_node(context)
        with torch_threads(self.num_threads):
            model = load_sent(build_exclusively(self.model_fn, context), message)
            data = data_fn(context, *_evaluated_partition(message, context))
            device = self.trainers.known_device(context) or AUTO
            outcome = evaluate(model, data, step=step, weight=weight, device=device)
        metrics = MetricRecord({**outcome.metrics, NUM_EXAMPLES: outcome.num_examples})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)


Work: TypeAlias = Callable[[NodeTraining], Message]

_WORKS: dict[str, Work] = {RING: train_as_member, GROUP: train_whole_group}
"""The client half of each method, by the record that its messages have; the first that a message has counts."""


def _evaluated_partition(message: Message, context: Context) -> tuple[int, int]:
    """Return the partition on which the node trains as a member of a group, or else its own."""
    told = message.content.config_records.get(CONFIG, ConfigRecord()).get(EVALUATED)
    if told is None:
        return partition_of(context)
    partition, num_partitions = cast(list[int], told)
    return partition, num_partitions
