"""A ClientApp for pipelines: a small text model and data that are not ours, and nodes that fail on request."""

import os
import signal
import time
import tomllib
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn
from torch.utils.data import Dataset

from socflower.clients.app import make_client_app
from socflower.cluster import Cluster, parse_cluster
from socflower.engines.deployment.flower_processes import free_ports
from socflower.pipeline.recovery.session import _Session
from socflower.pipeline.runtime.channels import Channels
from socflower.pipeline.runtime.stage import StageWork
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import GROUP

NUM_SAMPLES, BATCH = 96, 24
SHELF = """
[cluster]
name = "shelf"
soc_bytes_per_s = 12.5e6

[[board]]
count = 1
device = "jetson-nx"

[[board]]
count = 2
device = "jetson-nano"
"""


class Tagger(nn.Module):
    """A text model without recurrence: tokens in, a class out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.out = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.mix(self.norm(x))
        return self.out(x.mean(1))


class Sentences(Dataset[tuple[Tensor, int]]):
    """Tokens, and the quarter of the table that most of them are from."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.tokens = torch.from_numpy(rng.integers(0, 40, (NUM_SAMPLES, 9)))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.tokens[index]
        return row, int(torch.bincount(row // 10, minlength=4).argmax())


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def shelf() -> Cluster:
    tables = tomllib.loads(SHELF)
    return parse_cluster(tables["cluster"], tables["board"])


_passes_left = {"forward": 0, "backward": 0, "sum": 0, "backup": 0, "move": 0}
_signal = signal.SIGKILL
_forward, _backward = StageWork.forward, StageWork.backward
_sum, _back_up, _move = Channels.all_reduce, _Session._back_up, _Session._move


_pass_s = 0.0


def _count(kind: str, num_samples: int) -> None:
    time.sleep(_pass_s * num_samples)
    _passes_left[kind] -= 1
    if _passes_left[kind] == 0:
        os.kill(os.getpid(), _signal)


def _counted_forward(self: StageWork, micro_batch: int, entering: Any, **named: Any) -> Any:
    _count("forward", len(entering[0]))
    return _forward(self, micro_batch, entering, **named)


def _counted_backward(self: StageWork, *args: Any, **named: Any) -> Any:
    _count("backward", 0)
    return _backward(self, *args, **named)


def _counted_sum(self: Channels, *args: Any) -> None:
    _count("sum", 0)
    _sum(self, *args)


def _counted_backup(self: _Session) -> None:
    _back_up(self)
    _count("backup", 0)


def _counted_move(self: _Session, parts: Any) -> None:
    _count("move", 0)
    _move(self, parts)


def failing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Kill or stop the process before its n-th pass, as `dies-at-forward` and the like of its node config say.

    So it does before its n-th sum of gradients, after its n-th backup, and before the n-th time that layers move.

    A pass takes at least `sample-s` for each sample.
    """
    global _signal, _pass_s
    _pass_s = float(context.node_config.get("sample-s", 0.0))
    if context.node_config.get("dies-at-start") and GROUP in message.content.config_records:
        os.kill(os.getpid(), signal.SIGKILL)
    for kind in _passes_left:
        for what, number in (("dies", signal.SIGKILL), ("stops", signal.SIGSTOP)):
            if at := int(context.node_config.get(f"{what}-at-{kind}", 0)):
                _passes_left[kind], _signal = at, number
    return call_next(message, context)


KEYS = (
    "no-data",
    "sample-s",
    "dies-at-start",
    *(f"{what}-at-{kind}" for what in ("dies", "stops") for kind in _passes_left),
)
"""Of node configs, that `failing` reads."""


def fail_on_request() -> None:
    """Make the passes of this process do what `failing` asks for."""
    StageWork.forward, StageWork.backward = _counted_forward, _counted_backward  # type: ignore[method-assign]
    Channels.all_reduce = _counted_sum  # type: ignore[assignment,method-assign]
    _Session._back_up, _Session._move = _counted_backup, _counted_move  # type: ignore[method-assign]


def sentences_of(context: Context, partition: int, count: int) -> Sentences:
    """Return the data of a node that has some."""
    assert not context.node_config.get("no-data"), "this node has no data"
    return Sentences()


def client_app(trainer: Any = None, model: Any = tagger) -> ClientApp:
    """Return a ClientApp, by default one that trains with SGD on the CPU."""
    fail_on_request()
    return make_client_app(
        lambda context: model(),
        sentences_of,
        trainer or FP32Trainer(optimizer=sgd(0.2), device="cpu"),
        mods=[failing],
        extra_keys=KEYS,
    )


def node_configs(
    of_soc: dict[int, dict[str, Any]] | None = None, count: int = 3
) -> list[dict[str, Any]]:
    """Return a config with a ring address for each of the shelf's boards."""
    return [
        {"board": soc, "slot": 0, "ring": f"127.0.0.1:{port}", **(of_soc or {}).get(soc, {})}
        for soc, port in enumerate(free_ports(count))
    ]
