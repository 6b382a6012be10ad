"""Measurements of `int8_step` in separate processes: memory, a step without torch, and two threads.

Only the functions about torch import it.
"""

import ctypes
import gc
import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.harness import measure, measure_interleaved
from socflower import _int8
from socflower.precision import EngineSettings, Int8Model

BATCH = 64
NUM_CLASSES = 10
LEARNING_RATE = 0.01

INPUT_SHAPES = {
    "lenet5": (1, 28, 28),
    "vgg11": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "mobilenet-v1": (3, 32, 32),
}

Batch = tuple[np.ndarray, np.ndarray]


def batches(shape: tuple[int, int, int], number: int) -> list[Batch]:
    """Return batches that can be learnt: a pattern for each class with as much noise, and one label in five wrong.

    Wrong labels keep the loss and the gradients away from zero.
    """
    rng = np.random.default_rng(0)
    patterns = rng.standard_normal((NUM_CLASSES, *shape), dtype=np.float32)
    made = []
    for _ in range(number):
        truth = rng.integers(0, NUM_CLASSES, BATCH)
        images = patterns[truth] + rng.standard_normal((BATCH, *shape), dtype=np.float32)
        labels = np.where(rng.random(BATCH) < 0.2, rng.integers(0, NUM_CLASSES, BATCH), truth)
        made.append((images, labels.astype(np.int32)))
    return made


def torch_step(
    torch: Any,
    module: Any,
    *,
    channels_last: bool = True,
    compiled: bool = False,
    bf16: bool = False,
) -> Callable[[Any, Any], None]:
    """Return a training step with SGD; torch.compile may compile all but the update, autocast use bf16 in it."""
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def loss_of(images: Any, labels: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return torch.nn.functional.cross_entropy(module(images), labels)

    loss = torch.compile(loss_of) if compiled else loss_of

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        loss(images, labels).backward()
        optimizer.step()

    return step


def torch_batch(torch: Any, batch: Batch, *, channels_last: bool = True) -> tuple[Any, Any]:
    """Return a batch as tensors."""
    images = torch.from_numpy(batch[0])
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.from_numpy(batch[1]).long()


def our_peak_bytes(kernel: str, model: str, small: str) -> int:
    """Return by how many bytes three steps of the saved `model` raise the peak of resident memory.

    A step of the saved `small` model comes first, so that libraries are loaded and their code is used.
    """
    settings = EngineSettings(kernel=kernel)

    def three_steps(path: str) -> None:
        network = Int8Model.load(Path(path), settings=settings)
        for images, labels in batches(network.graph.input_shape, 1) * 3:
            network.train_step(images, labels, learning_rate=LEARNING_RATE, progress=0.0)

    return _peak_growth_bytes(lambda: three_steps(model), lambda: three_steps(small))


def torch_peak_bytes(model: str, small: str) -> int:
    """Return the same for torch and the models of these names."""
    import torch

    from benchmarks.int8_settings import one_thread
    from socflower.workloads.models.classifiers import build_model

    one_thread(torch)

    def three_steps(name: str) -> None:
        channels, size, _ = INPUT_SHAPES[name]
        step = torch_step(
            torch,
            build_model(
                name, in_channels=channels, image_size=size, num_classes=NUM_CLASSES, seed=0
            ),
        )
        for batch in batches(INPUT_SHAPES[name], 1) * 3:
            step(*torch_batch(torch, batch))

    return _peak_growth_bytes(lambda: three_steps(model), lambda: three_steps(small))


def _peak_growth_bytes(function: Callable[[], None], warm_up: Callable[[], None]) -> int:
    warm_up()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # Otherwise the function would reuse memory that the warm-up freed, and it would not count.
        trim(0)
    # Loading torch may have set the peak of the process; writing 5 resets it.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before_bytes


def _status_bytes(key: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * 1024


class _NoTorch(MetaPathFinder):
    """Refuses to import torch, as if it were not installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == "torch":
            raise ImportError(f"{fullname} is blocked here")


class _TypedConvolution(_int8.Convolution):
    """A convolution (or linear layer) that records the element types of its operands and results."""

    seen: ClassVar[set[tuple[str, ...]]] = set()

    def forward(self, engine: Any, x: Any, weight: Any, bias: Any, out: Any, *rest: Any) -> int:
        self.seen.add(("forward", str(x.dtype), str(weight.dtype), str(out.dtype)))
        return super().forward(engine, x, weight, bias, out, *rest)

    def input_gradient(self, engine: Any, dy: Any, weight: Any, out: Any, *rest: Any) -> int:
        self.seen.add(("input gradient", str(dy.dtype), str(weight.dtype), str(out.dtype)))
        return super().input_gradient(engine, dy, weight, out, *rest)

    def weight_gradient(self, engine: Any, x: Any, dy: Any, out: Any, *rest: Any) -> int:
        self.seen.add(("weight gradient", str(x.dtype), str(dy.dtype), str(out.dtype)))
        return super().weight_gradient(engine, x, dy, out, *rest)


_FUNCTIONS = ("forward", "input gradient", "weight gradient")


def saved_model_step(kernel: str, model: str, blocked: bool, repeats: int) -> dict[str, Any]:
    """Train and evaluate a saved model; return the median seconds of a step and a list of faults.

    With `blocked` torch cannot be imported; otherwise it is imported and not used. In these first steps exponents are
    searched, so all operands of products must be int8 and all results int32.
    """
    if blocked:
        sys.meta_path.insert(0, _NoTorch())
    imported = _can_import_torch()
    # Programs take their convolutions from this name.
    _int8.Convolution = _TypedConvolution
    network = Int8Model.load(Path(model), settings=EngineSettings(kernel=kernel))
    ((images, labels),) = batches(network.graph.input_shape, 1)
    step = partial(network.train_step, images, labels, learning_rate=LEARNING_RATE, progress=0.0)
    time = measure(step, repeats=repeats)
    evaluated = network.evaluate(images, labels)

    wrong = []
    if blocked and (imported or any(name.partition(".")[0] == "torch" for name in sys.modules)):
        wrong.append("torch was imported")
    if _TypedConvolution.seen != {(function, "int8", "int8", "int32") for function in _FUNCTIONS}:
        wrong.append(f"products of {sorted(_TypedConvolution.seen)}")
    if any(
        weight.data.dtype != np.int8 or weight.master is not None
        for weight in network.parameters.weights.values()
    ):
        wrong.append("a weight is not int8 alone")
    if not (np.isfinite(evaluated.loss) and evaluated.num_samples == BATCH):
        wrong.append(f"evaluation gave {evaluated}")
    return {"step_s": time.median_s, "wrong": wrong}


def _can_import_torch() -> bool:
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


def thread_times(kernel: str, model: str, steps: int, repeats: int) -> dict[str, Any]:
    """Return median seconds of a step on one thread and on two, and whether both end with the same parameters."""
    networks = [
        Int8Model.load(Path(model), settings=EngineSettings(kernel=kernel, num_threads=threads))
        for threads in (1, 2)
    ]
    data = batches(networks[0].graph.input_shape, 8)
    times = measure_interleaved(
        [training(network, data) for network in networks], repeats=repeats, warmup=steps
    )
    one, two = (network.arrays() for network in networks)
    same = all(np.array_equal(one[name], two[name]) for name in one)
    return {"one_s": times[0].median_s, "two_s": times[1].median_s, "same": same}


def training(network: Int8Model, data: list[Batch]) -> Callable[[], float]:
    """Return a function that trains on the next batch of a cycle and returns its loss."""
    following = cycle(data)

    def step() -> float:
        images, labels = next(following)
        return network.train_step(images, labels, learning_rate=LEARNING_RATE, progress=0.0).loss

    return step
