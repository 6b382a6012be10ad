"""The cells of a device profile (one model at one batch size): their measurement and the file of finished cells."""

import copy
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from socflower import __version__, _int8
from socflower.cluster.cost_model import UPDATE_PASSES
from socflower.errors import ConfigError, TrainingFailed
from socflower.model_graph.layer_profile import profile_module
from socflower.model_graph.torch_device import device_label, settle
from socflower.precision import EngineSettings, Int8Model
from socflower.precision.int8.batch_splitting import (
    best_blocks,
    median_seconds,
    profile_batch_blocks,
)
from socflower.precision.int8.requantisation import RescalingPolicy
from socflower.precision.operator_costs import OperatorProfile, profile_operators
from socflower.profiling.power_meter import PowerMeter, RaplMeter, mean_watts
from socflower.wire.saved_state import write_atomically
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import data_shape

_CPU = torch.device("cpu")
_WATTS_S = 1.0
"""Seconds of repeated steps under the power meter; the slowest counters and sensors update a few times a second."""

_CELL_KEYS = frozenset((
    "model", "data", "batch_size", "num_threads", "kernel", "measured_on", "training_flops", "fp32_step_s",
    "int8_step_s", "fp32_samples_per_s", "int8_samples_per_s", "fp32_w", "int8_w", "operators", "switches_s",
    "placement", "step_s", "fp32_operators_s",
))  # fmt: skip

_STREAM_ELEMENTS = 1 << 24
"""Weights of the timed update: 64 MiB, three times that with gradient and momentum, larger than most caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The conditions that all measurements of a profile must share."""

    kernel: str
    num_threads: int
    torch: str
    socflower: str
    repeats: int
    processor: str
    # Label of the device that is measured beside the CPU; "": none.
    accelerator: str = ""

    def document(self) -> dict[str, Any]:
        """Return the conditions for a file of cells, without those that are empty."""
        return {key: value for key, value in asdict(self).items() if value != ""}


def conditions(
    *,
    kernel: str,
    num_threads: int,
    repeats: int,
    accelerator: torch.device | None = None,
) -> Conditions:
    """Return the conditions of this machine; `kernel` "" is the best one. Raises `ConfigError` if it is unknown."""
    try:
        engine = _int8.Engine(num_threads, [], kernel)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from None
    return Conditions(
        kernel=str(engine.kernel),
        num_threads=num_threads,
        torch=torch.__version__,
        socflower=__version__,
        repeats=repeats,
        processor=processor_name(),
        accelerator="" if accelerator is None else device_label(accelerator),
    )


def processor_name() -> str:
    """Return the system's name of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for key in ("model name", "Hardware", "Model"):
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def build_module(model: str, data: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return a model for a data set, and the shape of its images; the data need not be available."""
    shape = data_shape(data)
    module = build_model(
        model,
        in_channels=shape.channels,
        image_size=shape.size,
        num_classes=shape.num_classes,
        seed=1,
    )
    return module, (shape.channels, shape.size, shape.size)


def measure_cell(
    model: str,
    data: str,
    batch_size: int,
    at: Conditions,
    meter: PowerMeter | None,
    accelerator: torch.device | None = None,
) -> dict[str, Any]:
    """Return one cell of `profile --json`: whole steps, operators and placement, micro-batches, watts.

    With an `accelerator`, the cell has whole FP32 steps on it as well. Raises `ConfigError` if torch cannot train the
    model on so small a batch.
    """
    try:
        return _measure(model, data, batch_size, at, meter, accelerator)
    except ValueError as error:
        # Such as BatchNorm over a single value.
        raise ConfigError(
            f"profile: {model} on {data} cannot train on a batch of {batch_size} "
            f"({error}); choose others with --batch-size"
        ) from None


def _measure(
    model: str,
    data: str,
    batch_size: int,
    at: Conditions,
    meter: PowerMeter | None,
    accelerator: torch.device | None,
) -> dict[str, Any]:
    module, image = build_module(model, data)
    settings = EngineSettings(num_threads=at.num_threads, kernel=at.kernel)
    operators = profile_operators(module, image, batch_size, settings=settings, repeats=at.repeats)
    # Settled rescaling from the second batch on, as in most of a training.
    settings = replace(settings, rescaling=RescalingPolicy(warm_up_batches=1))
    int8 = Int8Model.from_module(module, input_shape=image, settings=settings, unsupported="fp32")
    costs = profile_module(module, image, model)
    figures: dict[str, Any] = {}
    with _threads(at.num_threads):
        int8_step = _int8_step(int8, module, image, batch_size)
        fp32_step = _fp32_step(module, data, batch_size)
        for side, step in (("int8", int8_step), ("fp32", fp32_step)):
            seconds, watts = _timed(step, at.repeats, meter)
            figures |= {
                f"{side}_step_s": seconds,
                f"{side}_samples_per_s": batch_size / seconds,
                f"{side}_w": watts,
            }
        if accelerator is not None:
            figures |= _accelerated(module, data, batch_size, at, meter, accelerator)
    placement = operators.placement
    return {
        "model": model,
        "data": data,
        "batch_size": batch_size,
        "num_threads": at.num_threads,
        "kernel": operators.kernel,
        "measured_on": date.today().isoformat(),
        "training_flops": costs.training_flops,
        "memory_bytes": costs.training_memory_bytes(batch_size),
        "operators": _operator_documents(operators, int8, batch_size, at.repeats),
        "switches_s": list(operators.switches_s),
        "placement": placement.path().replace("npu[", "int8[").replace("cpu[", "fp32["),
        "step_s": placement.latency_s,
        "fp32_operators_s": sum(latency.cpu_s for latency in operators.latencies),
        **figures,
    }


def _operator_documents(
    operators: OperatorProfile,
    int8: Int8Model,
    batch_size: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Return each operator's seconds in both formats, its side in the placement, and its best micro-batch."""
    profiled = profile_batch_blocks(int8.graph, batch_size, int8.engine, repeats=repeats)
    blocks, placement = best_blocks(profiled), operators.placement
    sides = dict(zip(placement.operators, placement.sides, strict=True))
    return [
        {
            "name": latency.name,
            "kind": int8.graph.node(latency.name).kind,
            "int8_s": None if math.isinf(latency.npu_s) else latency.npu_s,
            "fp32_s": latency.cpu_s,
            "side": "int8" if sides[latency.name] == "npu" else "fp32",
            "batch_block": blocks.get(latency.name, 0),
        }
        for latency in operators.latencies
    ]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _accelerated(
    module: nn.Module,
    data: str,
    batch_size: int,
    at: Conditions,
    meter: PowerMeter | None,
    accelerator: torch.device,
) -> dict[str, Any]:
    """Return a cell's figures of an accelerator."""
    # The processors' own counters do not measure a GPU.
    board_meter = None if isinstance(meter, RaplMeter) else meter
    step = _fp32_step(module, data, batch_size, accelerator)
    step_s, step_w = _timed(step, at.repeats, board_meter)
    return {
        "accelerator": device_label(accelerator),
        "gpu_step_s": step_s,
        "gpu_samples_per_s": batch_size / step_s,
        "gpu_w": step_w,
    }


def update_bytes_per_s(num_threads: int, device: torch.device) -> float:
    """Return the bytes of weights per second of torch's SGD with momentum, times the cost model's `UPDATE_PASSES`."""
    weight = torch.zeros(_STREAM_ELEMENTS, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.step()
        settle(device)

    with _threads(num_threads):
        seconds = median_seconds(step, 5)
    return UPDATE_PASSES * weight.numel() * weight.element_size() / seconds


class CellStore:
    """Finished cells in a file beside the profile, rewritten after each cell; without a path, in memory only.

    Only cells of the same conditions are used. Cells of other conditions are removed from the file when one is added.
    """

    def __init__(self, path: Path | None, at: Conditions) -> None:
        self.path = path
        self._at = at.document()
        self._cells: list[dict[str, Any]] = []
        self._host: dict[str, Any] = {}
        self.dropped: list[str] = []
        """Different conditions of dropped cells, such as "num_threads 1, now 2"."""
        document = self._read()
        if document is None:
            return
        if document["conditions"] == self._at:
            self._cells, self._host = document["cells"], document["host"]
        elif document["cells"]:
            for key, value in document["conditions"].items():
                now = self._at.get(key, "none")
                if value != now:
                    self.dropped.append(f"{key} {value}, now {now}")

    def find(self, model: str, data: str, batch_size: int) -> dict[str, Any] | None:
        """Return a finished cell, or None."""
        key = (model, data, batch_size)
        return next((cell for cell in self._cells if _key(cell) == key), None)

    def add(self, cell: dict[str, Any]) -> None:
        """Add or replace a cell, also in the file."""
        self._cells = [other for other in self._cells if _key(other) != _key(cell)] + [cell]
        self._write()

    def host_figure(self, key: str, measure: Callable[[], float | None]) -> float | None:
        """Return a figure of the whole machine; measure it if it is missing."""
        if key not in self._host:
            self._host[key] = measure()
            # A file without cells would be of no use.
            if self._cells:
                self._write()
        value: float | None = self._host[key]
        return value

    def cells_by_model(self) -> Mapping[str, list[dict[str, Any]]]:
        """Return the cells by model, in order of batch size, of the data set that was measured last."""
        models: dict[str, list[dict[str, Any]]] = {}
        for cell in self._cells:
            models.setdefault(cell["model"], []).append(cell)
        for name, cells in models.items():
            last = [cell for cell in cells if cell["data"] == cells[-1]["data"]]
            models[name] = sorted(last, key=lambda cell: int(cell["batch_size"]))
        return models

    def _read(self) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        try:
            document: dict[str, Any] = json.loads(self.path.read_text("utf-8"))
            tables = isinstance(document["conditions"], dict) and isinstance(document["host"], dict)
            complete = document["schema"] == 1 and tables
            for cell in document["cells"]:
                complete &= set(cell) >= _CELL_KEYS
                complete &= min(cell["fp32_step_s"], cell["int8_step_s"]) > 0
            if not complete:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self.path}: has no finished cells of a profile; delete or move it to measure them again"
            ) from None
        return document

    def _write(self) -> None:
        if self.path is None:
            return
        document = {
            "schema": 1,
            "conditions": self._at,
            "host": self._host,
            "cells": self._cells,
        }
        write_file(self.path, json.dumps(document, indent=1) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a file atomically; `ConfigError` if that fails."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"profile: cannot write {path}: {error.strerror}") from None


def _key(cell: Mapping[str, Any]) -> tuple[str, str, int]:
    return cell["model"], cell["data"], cell["batch_size"]


def _timed(
    step: Callable[[], None], repeats: int, meter: PowerMeter | None
) -> tuple[float, float | None]:
    """Return the median seconds of a step after three warm-up steps, and its watts if there is a meter."""
    step()
    step()
    seconds, watts = median_seconds(step, repeats), None
    if meter is not None:
        watts = mean_watts(meter, lambda: _repeat(step, _WATTS_S))
    return seconds, watts


def _repeat(step: Callable[[], None], seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        step()


def _int8_step(
    model: Int8Model,
    module: nn.Module,
    image: tuple[int, int, int],
    batch: int,
) -> Callable[[], None]:
    random = np.random.default_rng(0)
    images = random.standard_normal((batch, *image), dtype=np.float32)
    labels = random.integers(0, model.graph.num_classes, batch, dtype=np.int32)

    def step() -> None:
        try:
            model.train_step(images, labels, learning_rate=0.0, progress=0.0)
        except TrainingFailed:
            # Random labels over thousands of steps may diverge.
            model.load_state_dict(module.state_dict())

    return step


def _fp32_step(
    module: nn.Module,
    data: str,
    batch: int,
    device: torch.device = _CPU,
) -> Callable[[], None]:
    """Return a complete forward and backward step on the device, in the memory layout of FP32 clients."""
    shape, random = data_shape(data), torch.Generator().manual_seed(0)
    images = torch.randn(batch, shape.channels, shape.size, shape.size, generator=random)
    images = images.to(device, memory_format=torch.channels_last)
    labels = torch.randint(0, shape.num_classes, (batch,), generator=random).to(device)
    trained = copy.deepcopy(module).to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def step() -> None:
        trained.zero_grad(set_to_none=True)
        torch.autograd.backward(nn.functional.cross_entropy(trained(images), labels))
        settle(device)

    return step
