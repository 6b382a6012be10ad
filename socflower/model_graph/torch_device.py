"""The torch device that a computation runs on: its choice by name, and the differences between kinds of devices."""

import re

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, mapped

AUTO = "auto"
"""The accelerator that torch finds on this machine, else the CPU."""

_NAME = re.compile(r"[a-z]+(:\d+)?")
_NEITHER = "use cpu, or auto for what is there"


def resolve_device(name: str, where: str) -> torch.device:
    """Return the device of this machine by its name: "auto", "cpu", "cuda", "cuda:N", "mps" or another one of torch.

    `where` begins the message of the `ConfigError` for an invalid name, and for a device that is not there.
    """
    present = accelerator()
    if name == AUTO:
        return present or torch.device("cpu")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where} = {name!r}: no name of a device; use auto, cpu, cuda, cuda:N or mps"
        )
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if present is None or kind != present.type:
        raise ConfigError(
            f"{where} = {name!r}: torch {torch.__version__} finds {present or 'no accelerator'} on this "
            f"machine; {_NEITHER}"
        )
    last = num_devices() - 1
    if index and int(index) > last:
        raise ConfigError(
            f"{where} = {name!r}: devices of this machine are {kind}:0 to {kind}:{last}; {_NEITHER}"
        )
    # Without its number, a device would differ from that of its own tensors.
    return torch.device(kind, int(index)) if index else present


def accelerator() -> torch.device | None:
    """Return the accelerator that processes of this machine use by default; None if there is none.

    `CUDA_VISIBLE_DEVICES` chooses among several devices of CUDA.
    """
    if hasattr(torch, "accelerator"):
        # Since torch 2.6.
        if not torch.accelerator.is_available():
            return None
        found = torch.accelerator.current_accelerator()
        return None if found is None else torch.device(found.type, 0)
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps", 0) if torch.backends.mps.is_available() else None


def num_devices() -> int:
    """Return how many accelerators of the kind of `accelerator()` this machine has."""
    if hasattr(torch, "accelerator"):
        return torch.accelerator.device_count()
    return torch.cuda.device_count()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU for a model without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def device_label(device: torch.device) -> str:
    """Return a device as results name it, such as "cpu" or "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return "cpu" if device.type == "cpu" else str(device)


def settle(device: torch.device) -> None:
    """Wait until the device has done its work: accelerators compute while the program continues."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on the device; pinned memory is copied while the program continues."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def host_buffer(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of zeros on the CPU; it is pinned for CUDA, so that values are copied directly."""
    return torch.zeros(num_elements, dtype=dtype, pin_memory=device.type == "cuda")
