"""A whole training step in int8 against torch's in FP32 and bf16, at batch 64 on one thread.

Torch's step is eager with the channels last (NHWC) and first (NCHW), compiled, and, where the CPU has instructions for
bf16 and may use them, under autocast.

Our step is from float32 images to new parameters (NITI, SGD for the biases; the default, real scales with SGD and
momentum on FP32 masters; the other algorithms beside NITI), torch's from zeroed gradients to the end of SGD; all take
the same batches in turn. Ours is timed in its steady state, after the batches in which self-adaptive rescaling searches
every exponent, and NITI again with a search in every batch.

`ok`: the loss fell over those batches, and a few steps of a smaller batch give the same bits as the portable kernels.
Further rows: peak memory, two threads, and a step in a process that cannot import torch.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Row,
    less_is_better,
    machine,
    measure_interleaved,
    peer_notes,
    repeated,
)
from benchmarks.int8_settings import (
    Setting,
    describe_peers,
    in_setting,
    one_thread,
    rows_of,
    settings,
)
from benchmarks.int8_step_isolated import (
    INPUT_SHAPES,
    LEARNING_RATE,
    NUM_CLASSES,
    Batch,
    batches,
    torch_batch,
    torch_step,
    training,
)
from socflower.precision import (
    ALGORITHMS,
    NITI,
    EngineSettings,
    Int8Model,
    RescalingPolicy,
    TrainingAlgorithm,
)
from socflower.precision.algorithm import REAL_SCALES

TITLES = {
    "lenet5": "LeNet-5",
    "vgg11": "VGG-11",
    "resnet18": "ResNet-18",
    "mobilenet-v1": "MobileNetV1",
}
_WARM_UP = 16
# The default of 100 batches would take ResNet-18 too long.
_SETTLED = RescalingPolicy(warm_up_batches=_WARM_UP)
_IMAGES_OF_PORTABLE_STEPS = 16
_EAGER, _COMPILED = "torch FP32, eager", "torch FP32, torch.compile"
_CHANNELS_FIRST, _BF16 = "torch FP32, eager, NCHW", "torch bf16 autocast"


def run(quick: bool = False) -> list[Row]:
    """Return the rows of all models in each setting; with `quick` only LeNet-5, and torch is not compiled."""
    peer_notes.update(describe_peers())
    found = []
    with tempfile.TemporaryDirectory() as folder:
        in_setting(settings()[0], "benchmarks.int8_step:save_models", folder=folder)
        for setting in settings():
            for name in ("lenet5",) if quick else TITLES:
                found += rows_of(setting, "benchmarks.int8_step:step_rows", name=name, quick=quick)
            found += _isolated_rows(setting, folder, quick=quick)
    return found


def step_rows(kernel: str, name: str, quick: bool) -> list[Row]:
    """Return this process's rows of one model."""
    import torch

    one_thread(torch)
    module = _module(name)
    data = batches(INPUT_SHAPES[name], 8)
    usual, searching = (
        _int8_model(module, name, EngineSettings(kernel=kernel, rescaling=rescaling))
        for rescaling in (_SETTLED, RescalingPolicy(adaptive=False))
    )
    same = _same_bits_as_portable(module, name, kernel, data[0])
    by_algorithm = {"ours": training(usual, data)}
    for algorithm in ALGORITHMS.values():
        if algorithm is not NITI:
            model = _int8_model(
                module, name, EngineSettings(kernel=kernel, rescaling=_SETTLED), algorithm
            )
            by_algorithm[algorithm.name] = training(model, data)
    learned = {key: same and _learns(step, len(data)) for key, step in by_algorithm.items()}
    ok = learned["ours"] and learned[REAL_SCALES.name]

    steps: dict[str, Callable[[], object]] = {
        **by_algorithm,
        "searching": training(searching, data),
    }
    for peer, how in _torch_ways(kernel, quick=quick).items():
        steps[peer] = _torch_training(torch, _module(name), data, **how)
    # A turn has many short steps: a single one of a few milliseconds would find its peer's data in
    # the caches.
    turn = 20 if name == "lenet5" else 1
    turns = [repeated(one, turn) for one in steps.values()]
    times = measure_interleaved(turns, repeats=7 if quick else 11, warmup=1)
    ms = {key: time.median_s * 1e3 / turn for key, time in zip(steps, times, strict=True)}
    case = f"{kernel}: {TITLES[name]} step"
    rows = [
        less_is_better(case + suffix, ms[key], peer, ms[peer], "ms", ok=ok)
        for key, suffix in (
            ("ours", ""),
            ("searching", ", every exponent looked for in every batch"),
            (REAL_SCALES.name, f", {REAL_SCALES.name}"),
        )
        for peer in (_EAGER, _COMPILED, _CHANNELS_FIRST, _BF16)
        if peer in ms
    ]
    return rows + [
        less_is_better(f"{case}, {key}", ms[key], "NITI", ms["ours"], "ms", ok=learned[key])
        for key in by_algorithm
        if key != "ours"
    ]


def _torch_ways(kernel: str, *, quick: bool) -> dict[str, dict[str, bool]]:
    """Return torch's steps by name, as arguments of `torch_step`."""
    ways = {_EAGER: {}, _CHANNELS_FIRST: {"channels_last": False}}
    processor = Path("/proc/cpuinfo")
    has_bf16 = processor.exists() and "avx512_bf16" in processor.read_text()
    # Our path of AVX2 meets a torch that is limited to AVX2.
    if kernel != "avx2" and has_bf16:
        ways[_BF16] = {"bf16": True}
    if not quick:
        ways[_COMPILED] = {"compiled": True}
    return ways


def _learns(step: Callable[[], float], num_batches: int) -> bool:
    """Train until every exponent has been searched; return whether the loss fell."""
    losses = [step() for _ in range(_WARM_UP)]
    return float(np.mean(losses[-num_batches:])) < float(np.mean(losses[:num_batches]))


def save_models(folder: str) -> None:
    """Save the models that the isolated processes load."""
    for name in ("lenet5", "vgg11"):
        _int8_model(_module(name), name, EngineSettings()).save(Path(folder) / f"{name}.npz")


def _isolated_rows(setting: Setting, folder: str, *, quick: bool) -> list[Row]:
    name = "lenet5" if quick else "vgg11"
    model, small = f"{folder}/{name}.npz", f"{folder}/lenet5.npz"
    found = [_without_torch(setting, name, model, quick=quick)]
    if Path("/proc/self/clear_refs").exists():
        found.append(_memory(setting, name, model, small))
    if not quick and int(str(machine()["cores"])) > 1:
        found.append(_two_threads(setting, name, model))
    return found


def _without_torch(setting: Setting, name: str, model: str, *, quick: bool) -> Row:
    blocked, usual = (
        in_setting(
            setting, "benchmarks.int8_step_isolated:saved_model_step",
            kernel=setting.kernel, model=model, blocked=blocked, repeats=3 if quick else 15,
        )
        for blocked in (True, False)
    )  # fmt: skip
    wrong = blocked["wrong"] + usual["wrong"]
    return less_is_better(
        f"{setting.kernel}: {TITLES[name]} step of a saved model, torch's import blocked"
        + "".join(f"; {what}" for what in wrong),
        blocked["step_s"] * 1e3,
        "the same, torch imported",
        usual["step_s"] * 1e3,
        "ms",
        ok=not wrong,
    )


def _memory(setting: Setting, name: str, model: str, small: str) -> Row:
    isolated = "benchmarks.int8_step_isolated"
    ours = in_setting(
        setting, f"{isolated}:our_peak_bytes", kernel=setting.kernel, model=model, small=small
    )
    theirs = in_setting(setting, f"{isolated}:torch_peak_bytes", model=name, small="lenet5")
    return less_is_better(
        f"{setting.kernel}: {TITLES[name]}, peak memory of model, batch and step",
        ours / 1e6,
        _EAGER,
        theirs / 1e6,
        "MB",
        ok=ours > 0 and theirs > 0,
    )


def _two_threads(setting: Setting, name: str, model: str) -> Row:
    times = in_setting(
        setting, "benchmarks.int8_step_isolated:thread_times",
        kernel=setting.kernel, model=model, steps=_WARM_UP, repeats=15,
    )  # fmt: skip
    return less_is_better(
        f"{setting.kernel}: {TITLES[name]} step on two threads",
        times["two_s"] * 1e3,
        "one thread",
        times["one_s"] * 1e3,
        "ms",
        limit=times["one_s"] * 1e3 / 2,
        ok=times["same"],
    )


def _module(name: str) -> Any:
    from socflower.workloads.models.classifiers import build_model

    channels, size, _ = INPUT_SHAPES[name]
    return build_model(name, in_channels=channels, image_size=size, num_classes=NUM_CLASSES, seed=0)


def _int8_model(
    module: Any, name: str, settings: EngineSettings, algorithm: TrainingAlgorithm = NITI
) -> Int8Model:
    return Int8Model.from_module(
        module, input_shape=INPUT_SHAPES[name], algorithm=algorithm, settings=settings
    )


def _torch_training(
    torch: Any, module: Any, data: list[Batch], *, channels_last: bool = True, **how: bool
) -> Callable[[], None]:
    step = torch_step(torch, module, channels_last=channels_last, **how)
    following = cycle([torch_batch(torch, batch, channels_last=channels_last) for batch in data])
    return lambda: step(*next(following))


def _same_bits_as_portable(module: Any, name: str, kernel: str, batch: Batch) -> bool:
    images, labels = (array[:_IMAGES_OF_PORTABLE_STEPS] for array in batch)
    chosen = EngineSettings(kernel=kernel)
    arrays = []
    for settings_of_path in (chosen, replace(chosen, kernel="portable")):
        network = _int8_model(module, name, settings_of_path)
        for _ in range(2):
            network.train_step(images, labels, learning_rate=LEARNING_RATE, progress=0.0)
        arrays.append(network.arrays())
    return all(np.array_equal(arrays[0][key], arrays[1][key]) for key in arrays[0])
