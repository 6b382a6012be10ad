"""The torch device that a computation runs on: its choice by name, and what differs between kinds of devices."""

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
    """Return the device of this machine that `name` means: "auto", "cpu", "cuda", "cuda:N", "mps" or another of torch.

    `where` begins the message of the `ConfigError` for a name that is none, and for a device that is not there.
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
    count = num_devices()
    if index and int(index) >= count:
        raise ConfigError(
            f"{where} = {name!r}: devices of this machine are {kind}:0 to {kind}:{count - 1}; {_NEITHER}"
        )
    # Without its number, a device would differ from that of its own tensors.
    return torch.device(kind, int(index)) if index else present


def accelerator() -> torch.device | None:
    """Return the accelerator that a process of this machine uses unless it is told another one; None if there is none.

    `CUDA_VISIBLE_DEVICES` chooses among several of CUDA's.
    """
    if hasattr(torch, "accelerator"):
        # Since torch 2.6.
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        return None if found is None else torch.device(found.type, 0)
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps", 0) if torch.backends.mps.is_available() else None


def num_devices() -> int:
    """Return how many accelerators of the kind of `accelerator()` this machine has."""
    return (
        torch.accelerator.device_count()
        if hasattr(torch, "accelerator")
        else torch.cuda.device_count()
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU for a model without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def device_label(device: torch.device) -> str:
    """Return a device as results name it, such as "cpu" or "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    if device.type == "cpu":
        return "cpu"
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    )


def settle(device: torch.device) -> None:
    """Return when the device has done what it was given: accelerators compute while the program goes on."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on the device; the copy of pinned memory runs beside the program."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def host_buffer(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of zeros on the CPU, pinned if it exchanges values with CUDA, so that copies need no detour."""
    return torch.zeros(num_elements, dtype=dtype, pin_memory=device.type == "cuda")
