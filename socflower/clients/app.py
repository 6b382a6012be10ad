"""Makes a Flower ClientApp from a model function and a data function."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from socflower.clients.pipeline_client import budgets_of, coding_of, train_stage
from socflower.clients.privacy_mods import adapt_mod
from socflower.clients.ring_client import (
    MemberWork,
    answer_query,
    kept_model,
    member_reply,
    step_ledger,
    train_member,
)
from socflower.clients.saved_training import ResidualState, StateFiles, TrainerState, state_files
from socflower.clients.settings import MessageConfig, ReadSettings
from socflower.errors import ConfigError
from socflower.flower_adapter import has_mods
from socflower.model_graph.random_state import build_exclusively, own_random_state
from socflower.model_graph.torch_device import AUTO, device_label, device_of
from socflower.pipeline.plan import from_json
from socflower.pipeline.runtime.group import train_pipeline
from socflower.plain_numbers import plain_numbers
from socflower.thermal.limits import paced
from socflower.training.batches import local_batches
from socflower.training.fp32 import FP32Trainer
from socflower.training.group import GroupOutcome, train_group
from socflower.training.model_state import (
    frozen_digest,
    frozen_parameters,
    load_trainable_state,
    require_same_base,
    trainable_state,
    untrained_names,
)
from socflower.training.trainer import (
    SessionResult,
    Trainer,
    TrainingSession,
    TrainingSpan,
    arithmetic_of,
    mean_loss,
    torch_threads,
    try_loss,
)
from socflower.wire.message_keys import (
    ARRAYS,
    COMPLETED,
    CONFIG,
    DEPARTURES,
    EVALUATED,
    EVENTS,
    FROZEN_SHA256,
    GROUP,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    NUM_PARTITIONS,
    OUTCOME,
    PARTITION_ID,
    PIPELINE,
    PREEMPTED,
    QUERY_ACTION,
    RING,
    SERVER_ROUND,
    TRAIN_LOSS,
    TRAINED_ON,
    UNTRAINED,
    WARM_UP,
    DeviceReport,
    GroupTask,
    PipelineTask,
    RingOutcome,
    RingTask,
    decode,
    encode,
)
from socflower.wire.split_message_keys import SPLIT
from socflower.workloads.data_source import DataSource
from socflower.workloads.evaluation import EvaluationStep, EvaluationWeight, evaluate
from socflower.workloads.map_dataset import as_data_source

ModelFn: TypeAlias = Callable[[Context], nn.Module]
DataFn: TypeAlias = Callable[[Context, int, int], DataSource | Dataset[Any] | DataLoader[Any]]
SourceFn: TypeAlias = Callable[[Context, int, int], DataSource]
Metrics: TypeAlias = dict[str, int | float]
TrainerFn: TypeAlias = (
    Callable[[Context], Trainer] | Callable[[Context, Mapping[str, Any]], Trainer]
)
StateFolderFn: TypeAlias = Callable[[Context], Path | None]


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
    )
    made = ClientApp(mods=[adapt_mod(mod) for mod in mods])
    made.query(QUERY_ACTION)(answer_query)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        if app is not None and not {GROUP, SPLIT} & {*message.content.config_records}:
            return app(message, context)
        return client.train(message, context)

    if evaluate_data_fn is not None:
        evaluation_data_fn = _as_sources(evaluate_data_fn)

        @made.evaluate()
        def evaluate_client(message: Message, context: Context) -> Message:
            return client.evaluate(
                message, context, evaluation_data_fn, evaluate_step, evaluate_weight
            )

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
        return _CheckingTrainer(
            self._started_with(context, config),
            lambda: self._settings.check_training(message, config.read),
        )

    def known_device(self, context: Context) -> str | None:
        """Return the name of the trainer's device; None if the trainer depends on a message's train config."""
        if self._takes_config:
            return None
        trainer = cast(Trainer, self._trainer) if self._is_made else self._started_with(context)
        return _device_name(trainer)

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


def _device_name(trainer: Trainer) -> str:
    return str(getattr(trainer, "device", "cpu"))


class _CheckingTrainer:
    """A trainer that runs a check after its start."""

    def __init__(self, trainer: Trainer, check: Callable[[], None]) -> None:
        self.trainer, self.check = trainer, check
        self.device, self.arithmetic = _device_name(trainer), arithmetic_of(trainer)

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> TrainingSession:
        session = self.trainer.start(model, span, state)
        self.check()
        return session


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

    def train(self, message: Message, context: Context) -> Message:
        """Answer a TRAIN message: as a ring's member, as a whole group, or alone."""
        self.settings.check_node(context)
        records = message.content.config_records
        if SPLIT in records:
            raise ConfigError(
                "the message is for an edge of a split training; make its ClientApp with "
                "socflower.make_split_client_app"
            )
        trainer = self.trainers.make(message, context)
        with torch_threads(self.num_threads):
            model = build_exclusively(self.model_fn, context)
            if RING in records:
                return self._train_in_ring(model, message, context, trainer)
            _load(model, message)
            if GROUP in records:
                return self._train_as_group(model, message, context, trainer)
            metrics, end = _train_alone(model, message, context, self.data_fn, trainer)
            return _reply(RecordDict(), model, message, trainer, metrics, end)

    def evaluate(
        self,
        message: Message,
        context: Context,
        data_fn: SourceFn,
        step: EvaluationStep | None,
        weight: EvaluationWeight | None,
    ) -> Message:
        """Answer an EVALUATE message with metrics on this node's evaluation data."""
        self.settings.check_evaluation(message)
        self.settings.check_node(context)
        with torch_threads(self.num_threads):
            model = _load(build_exclusively(self.model_fn, context), message)
            data = data_fn(context, *_evaluated_partition(message, context))
            device = self.trainers.known_device(context) or AUTO
            outcome = evaluate(model, data, step=step, weight=weight, device=device)
        metrics = MetricRecord({**outcome.metrics, NUM_EXAMPLES: outcome.num_examples})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    def _train_as_group(
        self, model: nn.Module, message: Message, context: Context, trainer: Trainer
    ) -> Message:
        """Train all members of a group in this process."""
        records = message.content.config_records
        task = GroupTask.decode(records[GROUP])
        if task.reshuffle:
            data = [_all_data(task, context, self.data_fn)]
        else:
            data = [self.data_fn(context, part, task.num_partitions) for part in task.partitions]
        state = self._state(task, message, context)
        departures = _departures(message, task)
        if PIPELINE in records:
            pipeline = decode(PipelineTask, records[PIPELINE], "pipeline")
            outcome = _train_pipeline(
                model, pipeline, task, data[0], trainer, state.read(), departures
            )
        else:
            outcome = train_group(model, data, task, trainer, state.read(), departures=departures)
        state.save(outcome.end.state, outcome.mean_loss)
        stayed = [soc for position, soc in enumerate(task.members) if position not in departures]
        content = RecordDict()
        if departures:
            ended = RingOutcome(
                outcome=COMPLETED if stayed else PREEMPTED,
                members=tuple(stayed),
                num_steps=task.num_steps,
                answers=bool(stayed),
                preempted=tuple(task.members[position] for position in departures),
            )
            content[OUTCOME] = ConfigRecord(encode(ended))
        if not stayed:
            return Message(content, reply_to=message)
        _name_untrained(content, model)
        metrics: Metrics = {
            TRAIN_LOSS: outcome.mean_loss,
            NUM_EXAMPLES: outcome.num_samples,
            GROUP_ID: task.group_id,
        }
        return _reply(content, model, message, trainer, metrics, outcome.end)

    def _train_in_ring(
        self, model: nn.Module, message: Message, context: Context, trainer: Trainer
    ) -> Message:
        """Train as one member of a ring.

        Only the leader's message and the answering member's reply have the model (F8).
        """
        records = message.content.config_records
        task, ring = GroupTask.decode(records[GROUP]), decode(RingTask, records[RING], "ring")
        has_model = _load_as_member(model, message, kept_model(context, ring.model_sha256))
        if task.reshuffle:
            data = _all_data(task, context, self.data_fn)
        else:
            data = self.data_fn(context, ring.participant, task.num_partitions)
        is_leader = ring.leader == ring.participant
        state = self._state(task, message, context, is_leader=is_leader)
        ledger = None if self.ring_ledger is None else self.ring_ledger(context)
        position = task.partitions.index(ring.participant)
        work = MemberWork(
            context=context,
            group=task,
            ring=ring,
            model=model,
            has_model=has_model,
            data=data,
            trainer=trainer,
            state=state.read(),
            departs_at=_departures(message, task).get(position),
            on_step=step_ledger(ledger, message),
        )
        if PIPELINE in records:
            pipeline = decode(PipelineTask, records[PIPELINE], "pipeline")
            end = train_stage(replace(work, trainer=_plain(trainer)), pipeline)
        else:
            files = self._state_files(message, context)
            residuals = ResidualState(task, ring.participant, message, context, files)
            end = train_member(work, files, residuals)
        if end.end is None:
            return member_reply(message, context, task, end, None)
        state.save(end.end.state, end.mean_loss, in_file=end.outcome.answers)
        reply = member_reply(message, context, task, end, _weights(model, message))
        if PIPELINE not in records:
            _name_untrained(reply.content, model)
        return reply

    def _state(
        self, task: GroupTask, message: Message, context: Context, *, is_leader: bool = True
    ) -> TrainerState:
        digest = MessageConfig(message).digest(self.settings.declared)
        files = self._state_files(message, context)
        return TrainerState(task, message, context, files, digest, is_leader=is_leader)

    def _state_files(self, message: Message, context: Context) -> StateFiles | None:
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        if self.state_folder is None or WARM_UP in config:
            return None
        return state_files(message, self.state_folder(context))


def _train_pipeline(
    model: nn.Module,
    pipeline: PipelineTask,
    task: GroupTask,
    data: DataSource,
    trainer: Trainer,
    state: bytes | None,
    departures: Mapping[int, int],
) -> GroupOutcome:
    plan = from_json(pipeline.plan)
    return train_pipeline(
        model,
        data,
        task,
        plan,
        _plain(trainer),
        state,
        cuts=pipeline.cuts,
        layers_sha256=pipeline.layers_sha256,
        sample_shape=pipeline.sample_shape,
        coding=coding_of(pipeline),
        departures={task.members[position]: step for position, step in departures.items()},
        int8_socs=pipeline.int8_socs,
        budget_bytes=budgets_of(pipeline, plan),
    )


def _plain(trainer: Trainer) -> Trainer:
    """Return a trainer for the stages of a pipeline, which use more of it than `start`."""
    if not isinstance(trainer, _CheckingTrainer):
        return trainer
    trainer.check()
    return trainer.trainer


def _reply(
    content: RecordDict,
    model: nn.Module,
    message: Message,
    trainer: Trainer,
    metrics: Metrics,
    end: SessionResult,
) -> Message:
    """Return the reply with the trained model, its metrics and what the training reports."""
    content[ARRAYS] = _weights(model, message)
    content[METRICS] = MetricRecord({**metrics, **end.metrics})
    content[TRAINED_ON] = ConfigRecord(encode(_device_report(model, message, trainer)))
    if end.events:
        content[EVENTS] = ConfigRecord({"texts": list(end.events)})
    return Message(content, reply_to=message)


def _load_as_member(model: nn.Module, message: Message, kept: ArrayRecord | None) -> bool:
    """Load the model that was sent, or else the one that this node kept; return whether there was one."""
    sent = message.content.array_records.get(ARRAYS)
    if sent is None:
        _require_same_base(model, message)
        if kept is not None:
            load_trainable_state(model, kept.to_torch_state_dict())
        return kept is not None
    _load(model, message)
    frozen = [name for name in frozen_parameters(model) if name in sent]
    if frozen:
        raise ConfigError(
            f"{frozen[0]} is frozen and was sent, but only to the ring's leader; start the strategy with "
            "ArrayRecord(trainable_state(model)), and load frozen parameters in model_fn"
        )
    return True


def _all_data(task: GroupTask, context: Context, data_fn: SourceFn) -> DataSource:
    data = data_fn(context, 0, 1)
    if len(data) != task.num_samples:
        raise ConfigError(
            f"data_fn(context, 0, 1) returned {len(data)} samples, but the strategy was told "
            f"num_samples = {task.num_samples}; return all training data for partition 0 of 1, or "
            "pass reshuffle=False to the strategy"
        )
    return data


def _departures(message: Message, task: GroupTask) -> dict[int, int]:
    """Return the step before which a member leaves because of a scenario's event, by the member's position."""
    leaving = message.content.config_records.get(DEPARTURES, ConfigRecord())
    return {
        position: math.floor(cast(float, leaving[str(soc)]) * task.num_steps)
        for position, soc in enumerate(task.members)
        if str(soc) in leaving
    }


def _train_alone(
    model: nn.Module,
    message: Message,
    context: Context,
    data_fn: SourceFn,
    trainer: Trainer,
) -> tuple[Metrics, SessionResult]:
    """Train on this node's own partition, as FedAvg expects; epochs and steps continue across rounds."""
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    batch_size, num_epochs = _count(config, "batch-size", 32), _count(config, "local-epochs", 1)
    seed, earlier_rounds = _count(config, "seed", 1), _count(config, SERVER_ROUND, 1) - 1
    proximal_mu = config.get("proximal-mu", 0.0)
    if not isinstance(proximal_mu, int | float) or not 0.0 <= proximal_mu < math.inf:
        raise ConfigError(
            f"train config: proximal-mu = {proximal_mu!r} must be a number, 0 or more"
        )
    partition_id, num_partitions = _partition(context)
    data = data_fn(context, partition_id, num_partitions)
    if not len(data):
        raise ConfigError(
            f"data_fn(context, {partition_id}, {num_partitions}) returned no samples; give every node "
            "some, or start fewer nodes"
        )
    steps_per_epoch = -(-len(data) // batch_size)
    steps, first_epoch = steps_per_epoch * num_epochs, earlier_rounds * num_epochs
    span = TrainingSpan(
        first_step=earlier_rounds * steps,
        total_steps=_count(config, "num-rounds", earlier_rounds + 1) * steps,
        steps_per_epoch=steps_per_epoch,
        proximal_mu=float(proximal_mu),
    )
    session = trainer.start(model, span)
    batches = local_batches(
        len(data), batch_size, num_epochs, seed=(seed, partition_id), first_epoch=first_epoch
    )
    losses: list[Tensor] = []
    with own_random_state(seed, partition_id, span.first_step):
        for step, indices in enumerate(paced(batches)):
            key = seed, first_epoch + step // steps_per_epoch, partition_id
            batch = data.batch(torch.from_numpy(indices), key)
            if not earlier_rounds and not losses:
                try_loss(session, [batch], data, batch_size, divided=False)
            losses.append(session.step([batch]))
    metrics: Metrics = {TRAIN_LOSS: mean_loss(losses), NUM_EXAMPLES: len(data) * num_epochs}
    return metrics, session.finish()


def _count(config: ConfigRecord, key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"train config: {key} = {value!r} must be a whole number, 1 or more")
    return value


def _partition(context: Context) -> tuple[int, int]:
    try:
        return int(context.node_config[PARTITION_ID]), int(context.node_config[NUM_PARTITIONS])
    except KeyError as error:
        raise ConfigError(
            f"node {context.node_id}: its node config lacks {error}; start the SuperNode with "
            "--node-config 'partition-id=0 num-partitions=1'"
        ) from None


def _evaluated_partition(message: Message, context: Context) -> tuple[int, int]:
    """Return the partition on which the node trains as a member of a group, or else its own."""
    told = message.content.config_records.get(CONFIG, ConfigRecord()).get(EVALUATED)
    if told is None:
        return _partition(context)
    partition, num_partitions = cast(list[int], told)
    return partition, num_partitions


def _load(model: nn.Module, message: Message) -> nn.Module:
    """Load the sent tensors; frozen parameters that were not sent must equal the server's."""
    arrays = message.content.array_records[ARRAYS]
    load_trainable_state(model, arrays.to_torch_state_dict())
    if not all(name in arrays for name in frozen_parameters(model)):
        _require_same_base(model, message)
    return model


def _require_same_base(model: nn.Module, message: Message) -> None:
    """Raise `ConfigError` if the model's frozen parameters are not those of the server's model."""
    expected = message.content.config_records.get(CONFIG, ConfigRecord()).get(FROZEN_SHA256)
    require_same_base(
        frozen_digest(model), None if expected is None else str(expected), FROZEN_SHA256
    )


def _device_report(model: nn.Module, message: Message, trainer: Trainer) -> DeviceReport:
    """Return the device and the arithmetic of the training, for every member of a group."""
    group = message.content.config_records.get(GROUP)
    socs = () if group is None else GroupTask.decode(group).members
    return DeviceReport(
        devices=(device_label(device_of(model)),) * max(1, len(socs)),
        socs=socs,
        arithmetic=arithmetic_of(trainer),
    )


def _name_untrained(content: RecordDict, model: nn.Module) -> None:
    """Name the arrays that an outer strategy must leave unchanged; Flower cannot count an empty list's bytes."""
    if names := untrained_names(model):
        content[UNTRAINED] = ConfigRecord({"names": names})


def _weights(model: nn.Module, message: Message) -> ArrayRecord:
    """Return the trained tensors, and frozen parameters if they were sent, in the model's order."""
    sent = message.content.array_records.get(ARRAYS, ArrayRecord())
    entries = {
        **{name: part for name, part in frozen_parameters(model).items() if name in sent},
        **trainable_state(model),
    }
    names = [name for name in model.state_dict() if name in entries]
    return ArrayRecord({name: entries[name].detach().contiguous() for name in names})
