"""Makes a Flower ClientApp for the edges of a split training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from socflower.clients.privacy_mods import adapt_mod
from socflower.clients.ring_client import answer_query
from socflower.clients.saved_training import state_files
from socflower.clients.settings import ReadSettings
from socflower.clients.split.in_process import (
    SpanOutcome,
    SplitSettings,
    require_same_program,
    train_in_process,
)
from socflower.clients.split.remote_cloud import CloudLink, train_with_cloud
from socflower.clients.split.saved_halves import SplitState, state_owner
from socflower.edgecloud.split_program import SplitProgram
from socflower.errors import ConfigError
from socflower.model_graph.torch_device import device_label, resolve_device
from socflower.plain_numbers import plain_numbers
from socflower.training.trainer import torch_threads
from socflower.wire.message_keys import (
    ARRAYS,
    EVENTS,
    METRICS,
    NUM_EXAMPLES,
    QUERY_ACTION,
    TRAIN_LOSS,
    TRAINED_ON,
    DeviceReport,
    encode,
)
from socflower.wire.split_message_keys import SPLIT, SPLIT_REPORT, SplitTask

ProgramFn: TypeAlias = Callable[[Context], SplitProgram]
SplitDataFn: TypeAlias = Callable[[Context, int, int], Any]
CloudLinkFn: TypeAlias = Callable[[Context], CloudLink]
SettingsFn: TypeAlias = Callable[[Context], SplitSettings]
FolderFn: TypeAlias = Callable[[Context], Path | None]


@plain_numbers
def make_split_client_app(
    program_fn: ProgramFn,
    data_fn: SplitDataFn,
    *,
    cloud_data_fn: SplitDataFn | None = None,
    settings_fn: SettingsFn = lambda context: SplitSettings(),
    link_fn: CloudLinkFn = lambda context: CloudLink(),
    mods: Sequence[Mod] = (),
    num_threads: int = 1,
    state_folder: FolderFn | None = None,
    extra_keys: Sequence[str] = (),
) -> ClientApp:
    """Return a ClientApp whose nodes are edges of a split training; its strategy is `SplitReplay`.

    Parameters
    ----------
    program_fn : (context) -> SplitProgram
        The model, its possible cuts, and how it is trained. The cloud builds it from the same code.
    data_fn : (context, party, num_parties) -> data
        The samples of a party, in batches (inputs, labels) or in dicts with labels: a map-style torch `Dataset`, a
        `DataLoader`, a Hugging Face `Dataset` or `LabelledData`. Without a cloud, one node may be asked for all
        parties' data.
    cloud_data_fn : same form, optional
        The cloud's inputs for the same samples in a reverse split, for training in one process.
    settings_fn : (context) -> SplitSettings
        How features and gradients are encoded for transfer.
    link_fn : (context) -> CloudLink
        How this node connects to the cloud: certificates, shaping, timeouts.
    state_folder : (context) -> Path or None, optional
        Folder in which halves are saved between rounds, besides `context.state`, so that a training can be resumed.
    extra_keys : sequence of str
        As in `make_client_app`: keys that `mods` or functions of yours read.
    """
    client = _SplitClient(
        read=ReadSettings(maker="make_split_client_app", mods=mods, extra_keys=extra_keys),
        program_fn=program_fn,
        data_fn=data_fn,
        cloud_data_fn=cloud_data_fn,
        settings_fn=settings_fn,
        link_fn=link_fn,
        state_folder=state_folder,
    )
    app = ClientApp(mods=[adapt_mod(mod) for mod in mods])
    app.query(QUERY_ACTION)(answer_query)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with torch_threads(num_threads):
            return client.train(message, context)

    return app


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitClient:
    """The arguments of `make_split_client_app`, and the answer to TRAIN messages."""

    read: ReadSettings
    program_fn: ProgramFn
    data_fn: SplitDataFn
    cloud_data_fn: SplitDataFn | None
    settings_fn: SettingsFn
    link_fn: CloudLinkFn
    state_folder: FolderFn | None

    def train(self, message: Message, context: Context) -> Message:
        """Train the task of a message, with a remote cloud or with both halves here."""
        if SPLIT not in message.content.config_records:
            raise ConfigError(
                "split client: the message has no split task; the strategy must be "
                "socflower.SplitReplay"
            )
        self.read.check_training(message)
        self.read.check_node(context)
        task = SplitTask.decode(message.content.config_records[SPLIT])
        program = self.program_fn(context)
        if task.fingerprint:
            require_same_program("split client", program, task.fingerprint)
        sent = message.content.array_records[ARRAYS]
        arrays = {name: array.numpy() for name, array in sent.items()}
        folder = None if self.state_folder is None else self.state_folder(context)
        state = SplitState(task, context, state_files(message, folder, state_owner(task.trial)))
        settings = self.settings_fn(context)
        data = [self.data_fn(context, party, task.num_parties) for party in task.parties]
        if task.address:
            link = self.link_fn(context)
            outcome = train_with_cloud(program, task, arrays, data, state, settings, link)
        else:
            cloud_data = None
            if self.cloud_data_fn is not None and task.reverse:
                cloud_data = [
                    self.cloud_data_fn(context, party, task.num_parties) for party in task.parties
                ]
            outcome = train_in_process(program, task, arrays, data, cloud_data, state, settings)
        label = device_label(resolve_device(program.device, "split training: device"))
        devices = DeviceReport(devices=(label,) * len(task.parties), socs=task.parties)
        return _reply(message, outcome, devices)


def _reply(message: Message, outcome: SpanOutcome, devices: DeviceReport) -> Message:
    arrays = {name: Array(np.asarray(part, order="C")) for name, part in outcome.arrays.items()}
    metrics = MetricRecord({TRAIN_LOSS: outcome.mean_loss, NUM_EXAMPLES: outcome.num_samples})
    content = RecordDict(
        {
            ARRAYS: ArrayRecord(arrays),
            METRICS: metrics,
            TRAINED_ON: ConfigRecord(encode(devices)),
        }
    )
    if outcome.report is not None:
        content[SPLIT_REPORT] = ConfigRecord(outcome.report.encode())
    if outcome.events:
        content[EVENTS] = ConfigRecord({"texts": list(outcome.events)})
    return Message(content, reply_to=message)
