"""Makes a Flower ClientApp from a model function and a data function."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from socflower.clients.pipeline_client import coding_of, stage_reply, train_stage
from socflower.clients.privacy_mods import adapt_mod
from socflower.clients.ring_client import (
    answer_query,
    kept_model,
    member_reply,
    step_ledger,
    train_member,
)
from socflower.clients.saved_training import StateFiles, TrainerState, state_files
from socflower.clients.settings import MessageConfig, ReadSettings
from socflower.errors import ConfigError
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
from socflower.workloads import (
    DataSource,
    EvaluationStep,
    EvaluationWeight,
    as_data_source,
    evaluate,
)

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
    if app is not None and app._mods:
        raise ConfigError(
            "make_client_app: the mods of the given app would not see messages for groups; give them to "
            "make_client_app(..., mods=[...])"
        )
    made, own_app = ClientApp(mods=[adapt_mod(mod) for mod in mods]), app
    read_data = _as_sources(data_fn)
    trainers = _TrainerMaker(trainer, settings)

    def model_of(context: Context) -> nn.Module:
        return build_exclusively(model_fn, context)

    @made.query(QUERY_ACTION)
    def query(message: Message, context: Context) -> Message:
        return answer_query(message, context)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        if own_app is not None and not {GROUP, SPLIT} & {*message.content.config_records}:
            return own_app(message, context)
        settings.check_node(context)
        if SPLIT in message.content.config_records:
            raise ConfigError(
                "the message is an edge's part of a split training; make its ClientApp with "
                "socflower.make_split_client_app"
            )
        own_trainer, digest = (
            trainers.make(message, context),
            MessageConfig(message).digest(settings.declared),
        )
        with torch_threads(num_threads):
            if RING in message.content.config_records:
                return _train_in_ring(
                    model_of(context),
                    message,
                    context,
                    read_data,
                    own_trainer,
                    digest,
                    state_folder,
                    ring_ledger,
                )
            model = _load(model_of(context), message)
            if GROUP in message.content.config_records:
                metrics, end, outcome = _train_as_group(
                    model, message, context, read_data, own_trainer, digest, state_folder
                )
                content = RecordDict(
                    {OUTCOME: ConfigRecord(encode(outcome))} if outcome.preempted else {}
                )
                if not outcome.answers:
                    return Message(content, reply_to=message)
                _name_untrained(content, model)
            else:
                metrics, end = _train_alone(model, message, context, read_data, own_trainer)
                content = RecordDict()
            content[ARRAYS] = _weights(model, message)
            content[METRICS] = MetricRecord({**metrics, **end.metrics})
            content[TRAINED_ON] = ConfigRecord(encode(_device_report(model, message, own_trainer)))
            if end.events:
                content[EVENTS] = ConfigRecord({"texts": list(end.events)})
            return Message(content, reply_to=message)

    if evaluate_data_fn is None and own_app is not None:
        made.evaluate()(own_app)
    if evaluate_data_fn is not None:
        read_evaluation_data = _as_sources(evaluate_data_fn)

        @made.evaluate()
        def evaluate_client(message: Message, context: Context) -> Message:
            settings.check_evaluation(message)
            settings.check_node(context)
            with torch_threads(num_threads):
                model = _load(model_of(context), message)
                own_data = read_evaluation_data(context, *_evaluated_partition(message, context))
                outcome = evaluate(
                    model,
                    own_data,
                    step=evaluate_step,
                    weight=evaluate_weight,
                    device=trainers.known_device(context) or AUTO,
                )
            metrics = MetricRecord({**outcome.metrics, NUM_EXAMPLES: outcome.num_examples})
            return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return made


def _as_sources(data_fn: DataFn) -> SourceFn:
    """Return a user's `data_fn` with its data in the form that training reads."""
    return lambda context, partition_id, num_partitions: as_data_source(
        data_fn(context, partition_id, num_partitions)
    )


class _TrainerMaker:
    """Makes a message's trainer, which refuses settings of the train config that nobody reads."""

    def __init__(self, trainer: Trainer | TrainerFn | None, settings: ReadSettings) -> None:
        self._trainer, self._settings = trainer or FP32Trainer(), settings
        self._is_made = hasattr(self._trainer, "start")
        parameters = (
            [] if self._is_made else inspect.signature(cast(Any, trainer)).parameters.values()
        )
        self._takes_config = sum(each.default is each.empty for each in parameters) > 1

    def make(self, message: Message, context: Context) -> Trainer:
        config = MessageConfig(message)
        if not self._takes_config:
            self._settings.check_training(message)
            return cast(Trainer, self._trainer) if self._is_made else self._started_with(context)
        self._settings.check_training(message, {*config})  # what is not a setting of the trainer
        # Functions in the trainer may read the config too, at the latest when it starts.
        return _CheckingTrainer(
            self._started_with(context, config),
            lambda: self._settings.check_training(message, config.read),
        )

    def known_device(self, context: Context) -> str | None:
        """Return the name of the trainer's device; None for a trainer that is made from a message's train config."""
        if self._takes_config:
            return None
        trainer = cast(Trainer, self._trainer) if self._is_made else self._started_with(context)
        return str(getattr(trainer, "device", "cpu"))

    def _started_with(self, *arguments: Any) -> Trainer:
        made = cast(Callable[..., Trainer], self._trainer)(*arguments)
        if not hasattr(made, "start"):
            raise ConfigError(
                f"the trainer's function returned {type(made).__name__}; return a trainer, such as "
                "FP32Trainer()"
            )
        return made


class _CheckingTrainer:
    """A trainer with a check once it has started."""

    def __init__(self, trainer: Trainer, check: Callable[[], None]) -> None:
        self.trainer, self.check = trainer, check
        self.device, self.arithmetic = (
            str(getattr(trainer, "device", "cpu")),
            arithmetic_of(trainer),
        )

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> TrainingSession:
        session = self.trainer.start(model, span, state)
        self.check()
        return session


def _train_as_group(
    model: nn.Module,
    message: Message,
    context: Context,
    data_fn: SourceFn,
    trainer: Trainer,
    settings: str,
    state_folder: StateFolderFn | None,
) -> tuple[Metrics, SessionResult, RingOutcome]:
    task = GroupTask.decode(message.content.config_records[GROUP])
    data = (
        [_all_data(task, context, data_fn)]
        if task.reshuffle
        else [data_fn(context, partition, task.num_partitions) for partition in task.partitions]
    )
    state = TrainerState(
        task, message, context, _state_files(message, context, state_folder), settings
    )
    departures = _departures(message, task)
    if PIPELINE in message.content.config_records:
        outcome = _train_pipeline(model, message, task, data[0], trainer, state.read(), departures)
    else:
        outcome = train_group(model, data, task, trainer, state.read(), departures=departures)
    state.save(outcome.end.state, outcome.mean_loss)
    stayed = [soc for position, soc in enumerate(task.members) if position not in departures]
    ended = RingOutcome(
        outcome=COMPLETED if stayed else PREEMPTED,
        members=tuple(stayed),
        num_steps=task.num_steps,
        answers=bool(stayed),
        preempted=tuple(task.members[position] for position in departures),
    )
    return (
        {TRAIN_LOSS: outcome.mean_loss, NUM_EXAMPLES: outcome.num_samples, GROUP_ID: task.group_id},
        outcome.end,
        ended,
    )


def _train_pipeline(
    model: nn.Module,
    message: Message,
    task: GroupTask,
    data: DataSource,
    trainer: Trainer,
    state: bytes | None,
    departures: Mapping[int, int],
) -> GroupOutcome:
    pipeline = decode(PipelineTask, message.content.config_records[PIPELINE], "pipeline")
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
        budget_bytes=dict(zip(plan.socs, pipeline.budget_bytes, strict=True))
        if pipeline.budget_bytes
        else None,
    )


def _plain(trainer: Trainer) -> Trainer:
    """Return a trainer for the stages of a pipeline, which use more of it than `start`."""
    if not isinstance(trainer, _CheckingTrainer):
        return trainer
    trainer.check()
    return trainer.trainer


def _train_in_ring(
    model: nn.Module,
    message: Message,
    context: Context,
    data_fn: SourceFn,
    trainer: Trainer,
    settings: str,
    state_folder: StateFolderFn | None,
    ledger: StateFolderFn | None,
) -> Message:
    """Train as one member of a ring; only the leader's message and the answering member's reply have the model (F8)."""
    records = message.content.config_records
    task, ring = GroupTask.decode(records[GROUP]), decode(RingTask, records[RING], "ring")
    kept = kept_model(context, ring.model_sha256)
    has_model = ARRAYS in message.content.array_records or kept is not None
    if ARRAYS in message.content.array_records:
        _load(model, message)
        if frozen := [
            name
            for name in frozen_parameters(model)
            if name in message.content.array_records[ARRAYS]
        ]:
            raise ConfigError(
                f"{frozen[0]} is frozen and was sent, but only to the ring's leader; start the strategy "
                "with ArrayRecord(trainable_state(model)), and load frozen parameters in model_fn"
            )
    else:
        _require_same_base(model, message)
        if kept is not None:
            load_trainable_state(model, kept.to_torch_state_dict())
    data = (
        _all_data(task, context, data_fn)
        if task.reshuffle
        else data_fn(context, ring.participant, task.num_partitions)
    )
    state = TrainerState(
        task,
        message,
        context,
        _state_files(message, context, state_folder),
        settings,
        is_leader=ring.leader == ring.participant,
    )
    if PIPELINE in records:
        end = train_stage(
            context,
            task,
            ring,
            decode(PipelineTask, records[PIPELINE], "pipeline"),
            model=model,
            has_model=has_model,
            data=data,
            trainer=_plain(trainer),
            state=state.read(),
            departs_at=_departures(message, task).get(task.partitions.index(ring.participant)),
            on_step=step_ledger(ledger(context) if ledger is not None else None, message),
        )
        if end.end is not None:
            state.save(end.end.state, end.mean_loss, in_file=end.outcome.answers)
        return stage_reply(
            message, context, task, end, _weights(model, message) if end.end is not None else None
        )
    end = train_member(
        context,
        task,
        ring,
        model=model,
        has_model=has_model,
        data=data,
        trainer=trainer,
        state=state.read(),
        departs_at=_departures(message, task).get(task.partitions.index(ring.participant)),
        on_step=step_ledger(ledger(context) if ledger is not None else None, message),
        files=_state_files(message, context, state_folder),
    )
    if end.end is not None:
        state.save(end.end.state, end.mean_loss, in_file=end.outcome.answers)
    reply = member_reply(
        message, context, task, end, _weights(model, message) if end.end is not None else None
    )
    if end.end is not None:
        _name_untrained(reply.content, model)
    return reply


def _all_data(task: GroupTask, context: Context, data_fn: SourceFn) -> DataSource:
    data = data_fn(context, 0, 1)
    if len(data) != task.num_samples:
        raise ConfigError(
            f"data_fn(context, 0, 1) returned {len(data)} samples, but the strategy was told "
            f"num_samples = {task.num_samples}; return all training data for partition 0 of 1, or "
            "pass reshuffle=False to the strategy"
        )
    return data


def _state_files(
    message: Message, context: Context, state_folder: StateFolderFn | None
) -> StateFiles | None:
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    return state_files(
        message, None if state_folder is None or WARM_UP in config else state_folder(context)
    )


def _departures(message: Message, task: GroupTask) -> dict[int, int]:
    """Return, by position, the step before which a member leaves because of a scenario's event."""
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
    config = message.content.config_records.get(CONFIG, ConfigRecord())

    def setting(key: str, default: int) -> int:
        value = config.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"train config: {key} = {value!r} must be a whole number, 1 or more")
        return value

    proximal_mu = config.get("proximal-mu", 0.0)
    if not isinstance(proximal_mu, int | float) or not 0.0 <= proximal_mu < math.inf:
        raise ConfigError(
            f"train config: proximal-mu = {proximal_mu!r} must be a number, 0 or more"
        )
    batch_size, num_epochs = setting("batch-size", 32), setting("local-epochs", 1)
    partition_id, num_partitions = _partition(context)
    data = data_fn(context, partition_id, num_partitions)
    if not len(data):
        raise ConfigError(
            f"data_fn(context, {partition_id}, {num_partitions}) returned no samples; give every node "
            "some, or start fewer nodes"
        )
    steps = -(-len(data) // batch_size) * num_epochs
    earlier_rounds = setting(SERVER_ROUND, 1) - 1
    session = trainer.start(
        model,
        TrainingSpan(
            first_step=earlier_rounds * steps,
            total_steps=setting("num-rounds", earlier_rounds + 1) * steps,
            steps_per_epoch=steps // num_epochs,
            proximal_mu=float(proximal_mu),
        ),
    )
    batches = local_batches(
        len(data),
        batch_size,
        num_epochs,
        seed=(setting("seed", 1), partition_id),
        first_epoch=earlier_rounds * num_epochs,
    )
    epochs = (earlier_rounds * num_epochs + step // (steps // num_epochs) for step in count())
    with own_random_state(setting("seed", 1), partition_id, earlier_rounds * steps):
        losses: list[Tensor] = []
        for epoch, indices in zip(epochs, paced(batches), strict=False):
            batch = data.batch(torch.from_numpy(indices), (setting("seed", 1), epoch, partition_id))
            if not earlier_rounds and not losses:
                try_loss(session, [batch], data, batch_size, divided=False)
            losses.append(session.step([batch]))
    metrics: Metrics = {TRAIN_LOSS: mean_loss(losses), NUM_EXAMPLES: len(data) * num_epochs}
    return metrics, session.finish()


def _partition(context: Context) -> tuple[int, int]:
    try:
        return int(context.node_config[PARTITION_ID]), int(context.node_config[NUM_PARTITIONS])
    except KeyError as error:
        raise ConfigError(
            f"node {context.node_id}: its node config lacks {error}; start the SuperNode with "
            "--node-config 'partition-id=0 num-partitions=1'"
        ) from None


def _evaluated_partition(message: Message, context: Context) -> tuple[int, int]:
    """Return the partition that the node trains on as a member of a group, or its own where there are no groups."""
    told = message.content.config_records.get(CONFIG, ConfigRecord()).get(EVALUATED)
    if told is None:
        return _partition(context)
    partition, num_partitions = cast(list[int], told)
    return partition, num_partitions


def _load(model: nn.Module, message: Message) -> nn.Module:
    """Load what was sent; frozen parameters that were not are the node's own, and must be the server's."""
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
    """Return where and in which arithmetic the model was trained, for every member of a group."""
    group = message.content.config_records.get(GROUP)
    socs = () if group is None else GroupTask.decode(group).members
    return DeviceReport(
        devices=(device_label(device_of(model)),) * max(1, len(socs)),
        socs=socs,
        arithmetic=arithmetic_of(trainer),
    )


def _name_untrained(content: RecordDict, model: nn.Module) -> None:
    """Name the arrays that an outer strategy must not step on; Flower cannot count the bytes of an empty list."""
    if names := untrained_names(model):
        content[UNTRAINED] = ConfigRecord({"names": names})


def _weights(model: nn.Module, message: Message) -> ArrayRecord:
    """Return what training changes, and frozen parameters if they were sent."""
    sent = message.content.array_records.get(ARRAYS, ArrayRecord())
    entries = {
        **{name: part for name, part in frozen_parameters(model).items() if name in sent},
        **trainable_state(model),
    }
    return ArrayRecord(
        {
            name: entries[name].detach().contiguous()
            for name in model.state_dict()
            if name in entries
        }
    )
