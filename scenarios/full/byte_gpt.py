"""Model and data of byte_gpt.toml and byte_gpt_lora.toml: the GPT and the text of the template `text`, larger."""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CONTEXT, WIDTH, NUM_BLOCKS = 128, 160, 4  # 1.34 M parameters
NUM_TEST = 256


def _template() -> ModuleType:
    """Return the module of the template that `socflower new --template text` writes."""
    name = "socflower_text_template"
    if name not in sys.modules:
        file = Path(__file__).resolve().parents[2] / "templates" / "text" / "my_app" / "task.py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


class NextByte(nn.Module):
    """A GPT that gives the mean cross-entropy of the next byte, in nats, and no accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = _template().ByteGPT(CONTEXT, WIDTH, NUM_BLOCKS)

    def forward(self, text: Tensor) -> SimpleNamespace:
        """Return the loss of windows (n, context + 1)."""
        return SimpleNamespace(loss=_template().next_byte_loss(self.gpt, text))


class Texts(Dataset[dict[str, Tensor]]):
    """Windows of a text as the arguments of NextByte."""

    def __init__(self, text: bytes) -> None:
        self.windows = _template().Windows(text, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"text": self.windows[index]}


def modules(num_windows: int) -> tuple[Texts, Texts]:
    """Return windows of the standard library's modules, and of the bytes after them for the test."""
    return _split(_template().text_of_library((num_windows + NUM_TEST) * CONTEXT + 1), num_windows)


def topics(num_windows: int) -> tuple[Texts, Texts]:
    """Return windows of the text that `help("topics")` shows: English, and no code but examples."""
    file = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    return _split(file.read_bytes()[: (num_windows + NUM_TEST) * CONTEXT + 1], num_windows)


def _split(text: bytes, num_windows: int) -> tuple[Texts, Texts]:
    return Texts(text[: num_windows * CONTEXT + 1]), Texts(text[num_windows * CONTEXT :])


def adapted(base: str, rank: int) -> nn.Module:
    """Return a trained NextByte, frozen, with LoRA adapters of a rank on its attention.

    `base` is a file of `--save-model`, from the working folder.
    """
    import peft

    if not Path(base).is_file():
        raise FileNotFoundError(
            f"{base}: train the base first: socflower run byte_gpt --save-model {base}"
        )
    model = NextByte()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in np.load(base).items()})
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["queries_keys_values", "mix"]
    )
    made: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    assert isinstance(made, nn.Module)
    return made


def continued(base: str) -> nn.Module:
    """Return a trained NextByte of which all parameters train on."""
    model = NextByte()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in np.load(base).items()})
    return model
