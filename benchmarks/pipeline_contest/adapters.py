"""A workload of a contest: LoRA adapters that teach English to a byte-level GPT that was trained on code."""

import importlib.util
import sysconfig
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.pipeline_contest.work import Workload
from socflower.training.fp32 import FP32Trainer
from socflower.workloads.data_source import DataSource, Indices

CONTEXT, WIDTH, NUM_BLOCKS, RANK = 128, 128, 6, 8
BYTES = 256
# Windows of the test, after those of the training.
_NUM_TEST = 128
_BASE_RATE, _BASE_BATCH, _RATE = 2e-3, 16, 1e-2
_TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "text" / "my_app" / "task.py"


@cache
def _template() -> ModuleType:
    """Return the module of `socflower new --template text`, which has the network and reads the text."""
    spec = importlib.util.spec_from_file_location("text_template", _TEMPLATE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NextBytes(DataSource):
    """Windows of a text, (context,) int64, and the bytes that follow each of their bytes."""

    __slots__ = ("_windows",)

    def __init__(self, text: bytes) -> None:
        self._windows = _template().Windows(text, CONTEXT)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        windows = torch.stack([self._windows[int(index)] for index in indices])
        return windows[:, :-1], windows[:, 1:]


def code(num_windows: int) -> NextBytes:
    """Return the beginning of the standard library's modules."""
    return NextBytes(_template().text_of_library(num_windows * CONTEXT + 1))


@cache
def english(*, test: bool = False) -> NextBytes:
    """Return the text of `help("topics")`: its end for the test, otherwise the rest."""
    text = (Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py").read_bytes()
    bound = len(text) - _NUM_TEST * CONTEXT
    return NextBytes(text[bound - 1 :] if test else text[:bound])


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte in nats, of logits (n, context, 256)."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def base_model() -> nn.Module:
    """Return the network with its initial weights."""
    torch.manual_seed(0)
    model = _template().ByteGPT(CONTEXT, WIDTH, NUM_BLOCKS)
    assert isinstance(model, nn.Module)
    return model


def save_base(path: Path, num_windows: int) -> float:
    """Train the network on code, each window once, save its weights, and return the loss of the last tenth."""
    model, data = base_model(), code(num_windows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_BASE_RATE)
    order, losses = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)), []
    for indices in order.split(_BASE_BATCH):
        inputs, following = data.batch(indices)
        loss = loss_of(model(inputs), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.save(model.state_dict(), path)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def adapted(base: str, seed: int) -> nn.Module:
    """Return the trained network, frozen, with adapters on its attention, as PEFT makes them."""
    import peft

    model = base_model()
    model.load_state_dict(torch.load(base, weights_only=True))
    model.requires_grad_(False)
    torch.manual_seed(seed)
    made = peft.inject_adapter_in_model(
        peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["queries_keys_values", "mix"]),
        model,
    )
    assert isinstance(made, nn.Module)
    return made


def workload(base: Path, seed: int) -> Workload:
    """Return the training of adapters on a base."""
    return Workload(
        build=partial(adapted, str(base), seed),
        data=english,
        trainer=FP32Trainer(
            optimizer=partial(torch.optim.AdamW, lr=_RATE), loss=loss_of, device="cpu"
        ),
    )


def test_loss(model: nn.Module) -> float:
    """Return the mean loss on the English of the test."""
    data = english(test=True)
    with torch.no_grad():
        total = 0.0
        for indices in torch.arange(len(data)).split(16):
            inputs, following = data.batch(indices)
            total += float(loss_of(model(inputs), following)) * len(inputs)
        return total / len(data)
