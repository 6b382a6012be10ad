"""One message's training at a node: its model, trainer, data and saved state, and the reply to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from socflower.clients.saved_training import StateFiles, TrainerState, state_files
from socflower.clients.settings import MessageConfig
from socflower.errors import ConfigError
from socflower.model_graph.torch_device import device_label, device_of
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
)
from socflower.wire.codecs.int8_weights import coded
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    EVENTS,
    FROZEN_SHA256,
    GROUP,
    METRICS,
    NUM_PARTITIONS,
    PARTITION_ID,
    SAMPLES,
    SCALES,
    SERVER_ROUND,
    TRAINED_ON,
    UNTRAINED,
    DeviceReport,
    GroupTask,
    SentSamples,
    decode,
    encode,
)
from socflower.workloads.data_source import DataSource
from socflower.workloads.dispatched import received_samples

SourceFn: TypeAlias = Callable[[Context, int, int], DataSource]
StateFolderFn: TypeAlias = Callable[[Context], Path | None]
Metrics: TypeAlias = dict[str, int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTraining:
    """What a work needs to answer a TRAIN message; `model` has initial weights until `load`."""

    message: Message
    context: Context
    model: nn.Module
    trainer: Trainer
    data_fn: SourceFn
    # The keys of configs that the app declares, which a saved state does not depend on.
    declared: frozenset[str]
    state_folder: StateFolderFn | None
    ring_ledger: StateFolderFn | None

    @property
    def records(self) -> Mapping[str, ConfigRecord]:
        """The config records of the message, by name."""
        return self.message.content.config_records

    @property
    def config(self) -> ConfigRecord:
        """The train config; empty if the message has none."""
        return self.message.content.config_records.get(CONFIG, ConfigRecord())

    @property
    def partition(self) -> tuple[int, int]:
        """This node's own part of the data, and the number of parts."""
        return partition_of(self.context)

    def load(self) -> None:
        """Load the model that was sent."""
        load_sent(self.model, self.message)

    def state(self, task: GroupTask, *, is_leader: bool = True) -> TrainerState:
        """Return what keeps the state of a group's trainer between rounds."""
        digest = MessageConfig(self.message).digest(self.declared)
        return TrainerState(
            task, self.message, self.context, self.state_files, digest, is_leader=is_leader
        )

    @property
    def state_files(self) -> StateFiles | None:
        """The files of states on this node's disk; None without a folder."""
        if self.state_folder is None:
            return None
        return state_files(self.message, self.state_folder(self.context))

    def group_data(self, task: GroupTask, partition: int) -> DataSource:
        """Return the data of a member of a group: its own part, or all data if they are redistributed.

        If the hub has sent the samples of the interval, these are all data that the node needs.
        """
        if SAMPLES in self.records:
            sent = decode(SentSamples, self.records[SAMPLES], "samples")
            return received_samples(sent, task.num_samples)
        if not task.reshuffle:
            return self.data_fn(self.context, partition, task.num_partitions)
        data = self.data_fn(self.context, 0, 1)
        if len(data) != task.num_samples:
            raise ConfigError(
                f"data_fn(context, 0, 1) returned {len(data)} samples, but the strategy was told "
                f"num_samples = {task.num_samples}; return all training data for partition 0 of 1, or "
                "pass reshuffle=False to the strategy"
            )
        return data

    def reply(
        self, metrics: Metrics, end: SessionResult, content: RecordDict | None = None
    ) -> Message:
        """Return the reply with the trained model, its metrics and what the training reports."""
        content = content or RecordDict()
        content[ARRAYS] = self.weights()
        self.to_wire(content)
        content[METRICS] = MetricRecord({**metrics, **end.metrics})
        content[TRAINED_ON] = ConfigRecord(encode(self._device_report()))
        if end.events:
            content[EVENTS] = ConfigRecord({"texts": list(end.events)})
        return Message(content, reply_to=self.message)

    def weights(self) -> ArrayRecord:
        """Return the trained tensors, and frozen parameters if they were sent, in the model's order."""
        sent = self.message.content.array_records.get(ARRAYS, ArrayRecord())
        frozen = frozen_parameters(self.model).items()
        entries = {
            **{name: part for name, part in frozen if name in sent},
            **trainable_state(self.model),
        }
        names = [name for name in self.model.state_dict() if name in entries]
        return ArrayRecord({name: entries[name].detach().contiguous() for name in names})

    def to_wire(self, content: RecordDict) -> None:
        """Convert a reply's weights to int8 with scales, if asked for; the rest is rounded without bias."""
        if SCALES not in self.records or ARRAYS not in content.array_records:
            return
        draw = [self.config.get(key, 1) for key in ("seed", SERVER_ROUND)]
        random = np.random.default_rng([*cast(list[int], draw), self.partition[0]])
        weights = {name: array.numpy() for name, array in content.array_records[ARRAYS].items()}
        sent, scales = coded(weights, random)
        content[ARRAYS] = ArrayRecord({name: Array(array) for name, array in sent.items()})
        content[SCALES] = ConfigRecord(dict(scales))

    def name_untrained(self, content: RecordDict) -> None:
        """Name the arrays that an outer strategy must leave unchanged; Flower cannot count an empty list's bytes."""
        if names := untrained_names(self.model):
            content[UNTRAINED] = ConfigRecord({"names": names})

    def _device_report(self) -> DeviceReport:
        """Return the device and the arithmetic of the training, for every member of a group."""
        group = self.records.get(GROUP)
        socs = () if group is None else GroupTask.decode(group).members
        return DeviceReport(
            devices=(device_label(device_of(self.model)),) * max(1, len(socs)),
            socs=socs,
            arithmetic=arithmetic_of(self.trainer),
        )


def partition_of(context: Context) -> tuple[int, int]:
    """Return a node's part of the data, and the number of parts; `ConfigError` if its node config lacks them."""
    try:
        return int(context.node_config[PARTITION_ID]), int(context.node_config[NUM_PARTITIONS])
    except KeyError as error:
        raise ConfigError(
            f"node {context.node_id}: its node config lacks {error}; start the SuperNode with "
            "--node-config 'partition-id=0 num-partitions=1'"
        ) from None


def load_sent(model: nn.Module, message: Message) -> nn.Module:
    """Load the sent tensors; frozen parameters that were not sent must equal the server's."""
    arrays = message.content.array_records[ARRAYS]
    sent = arrays.to_torch_state_dict()
    scales = message.content.config_records.get(SCALES, ConfigRecord())
    for name, scale in scales.items():
        sent[name] = sent[name].float() * float(cast(float, scale))
    load_trainable_state(model, sent)
    if not all(name in arrays for name in frozen_parameters(model)):
        require_base_of(model, message)
    return model


def require_base_of(model: nn.Module, message: Message) -> None:
    """Raise `ConfigError` if the model's frozen parameters are not those of the server's model."""
    expected = message.content.config_records.get(CONFIG, ConfigRecord()).get(FROZEN_SHA256)
    require_same_base(
        frozen_digest(model), None if expected is None else str(expected), FROZEN_SHA256
    )


class CheckedTrainer:
    """A trainer that runs a check after its start."""

    def __init__(self, trainer: Trainer, check: Callable[[], None]) -> None:
        self.trainer, self.check = trainer, check
        self.device, self.arithmetic = device_name(trainer), arithmetic_of(trainer)

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> TrainingSession:
        """Start the trainer, then check."""
        session = self.trainer.start(model, span, state)
        self.check()
        return session


class ResumingTrainer(CheckedTrainer):
    """A trainer that raises `missing` at its start, unless a member of the ring has given it its state by then."""

    def __init__(self, trainer: Trainer, missing: ConfigError) -> None:
        super().__init__(trainer, lambda: None)
        self._missing = missing

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> TrainingSession:
        """Start the trainer with a state."""
        if state is None:
            raise self._missing
        return super().start(model, span, state)


def unchecked(trainer: Trainer) -> Trainer:
    """Check now, and return the trainer itself for the stages of a pipeline, which use more of it than `start`."""
    if not isinstance(trainer, CheckedTrainer):
        return trainer
    trainer.check()
    return trainer.trainer


def device_name(trainer: Trainer) -> str:
    """Return the name of a trainer's device."""
    return str(getattr(trainer, "device", "cpu"))
