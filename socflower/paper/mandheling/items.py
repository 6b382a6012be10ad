"""Our values for each table and figure of Mandheling: predicted, computed exactly on small cases, or stored."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from statistics import mean

import numpy as np
import torch
from torch import nn

from socflower.cluster import device, step_cost
from socflower.model_graph.layer_profile import profile_module
from socflower.paper.comparison import NOT_COMPARABLE, read_paper, stored_results, stored_row
from socflower.paper.mandheling.predictions import (
    BATCH,
    DSP,
    MNN,
    MNN_INT8,
    MODELS,
    PHONES,
    PROCESSORS,
    REDMI,
    XIAOMI_10,
    XIAOMI_11,
    Cost,
    batch_cost,
    centralised_cost,
    federated_cost,
    model_bytes,
    profile_of,
)
from socflower.paper.socflow_plus.heat import Experiment, temperature_after
from socflower.precision import (
    NITI,
    EngineSettings,
    Int8Model,
    RescalingPolicy,
    TrainingAlgorithm,
)
from socflower.precision.algorithm import ALGORITHMS, MLS_FORMAT, WAGEUBN, IntegerUpdate
from socflower.precision.int8.batch_splitting import BlockProfile
from socflower.precision.predicted_placement import OperatorLatency, place
from socflower.thermal.model.constants import constant
from socflower.workloads.models.classifiers import build_model
from socflower.workloads.sources import load_data

Ours = Mapping[str, float | bool | str]

ABLATION, STEPS, ACCURACIES = (
    "bench-int8-ablation.json",
    "bench-int8-step.json",
    "bench-int8-accuracy.json",
)
FEDERATED = "federated-int8.json"
_DRAWN = ("VGG-11", "VGG-16", "ResNet-34", "InceptionV3")
# Of Table 4's batches.
_BATCHES = (2, 4, 8, 16, 32, 64)


def figure_1() -> Ours:
    """Return a batch of training over one of inference, and ResNet-50's seconds and gigabytes."""
    vgg, size = profile_of("VGG-11"), 224
    resnet = build_model("resnet50", in_channels=3, image_size=size, num_classes=1000, seed=1)
    profile = profile_module(resnet, (3, size, size), "resnet50")
    cost = step_cost(vgg, device(XIAOMI_10), BATCH)
    found = {
        "training over inference": cost.compute_s / cost.forward_s,
        "training over inference, by FLOPs": vgg.training_flops / vgg.forward_flops,
        "ResNet-50, batch of 32, Snapdragon 865": step_cost(
            profile, device(XIAOMI_10), 32
        ).compute_s,
        "ResNet-50, batch of 32: memory": profile.training_memory_bytes(32) / 1e9,
    }
    return _and_texts("figure-1", found, "no watts of a video")


def dsp_peak() -> Ours:
    """Return the operations a second that Table 8 implies for the DSP."""
    return {"INT8 operations a second": device(XIAOMI_11).processor("npu").rate("vgg11") / 1e9}


def table_1() -> Ours:
    """Return which algorithms of the table are built in."""
    cells = read_paper("mandheling").item("table-1").cells
    return {cell.key: cell.key.lower().replace(" ", "-") in ALGORITHMS for cell in cells}


def table_2() -> Ours:
    """Return whether our NITI is configured as the example."""
    model = build_model("vgg11", in_channels=3, image_size=32, num_classes=10, seed=1)
    # Of the second convolution, 3x3 from 64 to 128 channels.
    weight = [each.detach() for each in model.parameters() if each.dim() == 4][1]
    xavier_std = math.sqrt(2.0 / (64 * 9 + 128 * 9))
    return {
        "weights are INT8": NITI.weight == "int8",
        "weights are updated in INT8": isinstance(NITI.update, IntegerUpdate),
        "initial weights have Xavier's variance": math.isclose(
            float(weight.std()), xavier_std, rel_tol=0.05
        ),
    }


def table_3() -> Ours:
    """Return whether BatchNorm leaves the int8 engine."""
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 2))
    model = Int8Model.from_module(module, input_shape=(3, 4, 4), algorithm=NITI)
    return _and_texts(
        "table-3", {"Normalization has no integer form": bool(model.islands)}, "no DSP here"
    )


def scheduling() -> Ours:
    """Return whether F17 finds the best placement of Table 3's operators, and merging all on the CPU a worse one."""
    cells = {cell.key: cell.value for cell in read_paper("mandheling").item("table-3").cells}
    kinds = [OperatorLatency(name="convolution", cpu_s=0.020, npu_s=0.002)]
    for name in ("Transpose", "WeightRotate", "Slice"):
        cpu_ms, npu_ms = (cells[f"{name}/{side}"] or 0.0 for side in ("CPU", "DSP"))
        kinds.append(OperatorLatency(name=name, cpu_s=cpu_ms / 1e3, npu_s=npu_ms / 1e3))
    is_best, merging_is_worse = True, False
    for number in range(1, 6):
        for operators in product(kinds, repeat=number):
            found_s = place(operators, [_SWITCH_S] * (number - 1)).latency_s
            least_s = min(
                _placed_s(operators, on_cpu) for on_cpu in product((False, True), repeat=number)
            )
            merged_s = _placed_s(operators, [each.cpu_s < each.npu_s for each in operators])
            is_best = is_best and math.isclose(found_s, least_s)
            merging_is_worse = merging_is_worse or merged_s > 1.001 * found_s
    return {
        "the dynamic program finds the best placement": is_best,
        "placing all unfriendly operators on the CPU can be slower": merging_is_worse,
    }


# §3.3: around 25 ms on the Xiaomi 10.
_SWITCH_S = 0.025


def _placed_s(operators: Sequence[OperatorLatency], on_cpu: Sequence[bool]) -> float:
    placed = zip(operators, on_cpu, strict=True)
    working_s = sum(each.cpu_s if is_on_cpu else each.npu_s for each, is_on_cpu in placed)
    return working_s + _SWITCH_S * sum(left != right for left, right in pairwise(on_cpu))


def figure_4() -> Ours:
    """Return how often the scales of LeNet-5 change in a training on digits, past the first quarter."""
    digits, random, num_batches = load_data("digits").train, np.random.default_rng(1), 400
    every = EngineSettings(rescaling=RescalingPolicy(adaptive=False))
    module = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=1)
    model = Int8Model.from_module(module, input_shape=(1, 28, 28), algorithm=NITI, settings=every)
    nodes = model.graph.nodes
    watched = ((nodes[0].name, "forward"), (nodes[-1].name, "backward"))
    exponents: list[tuple[int | None, ...]] = []
    for number in range(num_batches):
        images, labels = digits.batch(random.integers(0, len(digits), BATCH))
        model.train_step(
            images.numpy(),
            labels.numpy().astype(np.int32),
            learning_rate=0.0,
            progress=number / num_batches,
        )
        exponents.append(tuple(model.trackers.tracker(*each).exponent for each in watched))
    first, gradient = zip(*exponents[num_batches // 4 :], strict=True)
    between = _batches_between_changes(first)
    return {
        "two alternating values": len(set(first)) == 2,
        "a change every 10 to 60 batches": 10.0 <= between <= 60.0,
        "mean batches between changes": between,
        "gradients of the last layer: mean batches between changes": _batches_between_changes(
            gradient
        ),
    }


def _batches_between_changes(exponents: Sequence[int | None]) -> float:
    return len(exponents) / max(1, sum(left != right for left, right in pairwise(exponents)))


def rescaling() -> Ours:
    """Return what rescaling from time to time saves on this CPU, of the stored ablation."""
    saved = [_saved(row) for row in _ablation("rescaling")]
    found = {
        "less time, least": min(saved),
        "less time, most": max(saved),
        "a search in every batch over none": max(row["ratio"] for row in _ablation("rescaling")),
    }
    return _and_texts("rescaling", found, "not trained")


def table_4() -> Ours:
    """Return the milliseconds of the forward pass by the catalogue's rate, and which batches F15 splits.

    F15 chooses from the table's own milliseconds: micro-batches of 4 take as many times the 4's as there are.
    """
    rate = device(XIAOMI_10).processor("npu").flops_per_s
    item = {cell.key: cell.value or 0.0 for cell in read_paper("mandheling").item("table-4").cells}
    found: dict[str, float | bool] = {}
    for side in (8, 16, 32):
        size = f"{side}x{side}"
        for batch in _BATCHES:
            operations = 2.0 * 64 * 64 * 9 * side * side * batch
            found[f"{size}/{batch}"] = 1e3 * operations / rate
        seconds = {0: item[f"{size}/{BATCH}"]} | {
            block: BATCH / block * item[f"{size}/{block}"] for block in _BATCHES[:-1]
        }
        chosen = BlockProfile(name=size, seconds=seconds).best
        found[f"a batch of 64 at {size} is split"] = chosen > 0
    return {**found, "32x32: batch of 32 over 4": found["32x32/32"] / found["32x32/4"]}


def preparation() -> Ours:
    """Return the milliseconds that a step saves by keeping its graph, of the stored ablation."""
    (row,) = _ablation("graph reuse", "vgg11")
    found = {"VGG-11, this engine": row["peer_value"] - row["ours"]}
    return _and_texts("preparation", found, "another engine")


def table_6() -> Ours:
    """Return operations of a training sample, and convolutions."""
    found: dict[str, float | str] = {}
    for label in MODELS:
        profile = profile_of(label)
        kinds = [layer.kind for layer in profile.layers]
        # ResNet-18's operations are those of 32x32 pixels, where the paper has ImageNet's.
        if label != "ResNet-18":
            found[f"{label}: FLOPs"] = profile.training_flops / 1e9
        found[f"{label}: convolutions"] = kinds.count("Conv2d")
    module = build_model("inception-v3", in_channels=3, image_size=32, num_classes=10, seed=1)
    blocks = [each for each in module.children() if not isinstance(each, nn.Linear)]
    found["InceptionV3: convolutions, a block as one"] = sum(
        any(isinstance(part, nn.Conv2d) for part in each.modules()) for each in blocks
    )
    return _and_texts("table-6", found, "no such builder")


def figure_5() -> Ours:
    """Return the seconds of a batch over the DSP's, and of FP32 over int8 on this CPU."""
    found = _over_the_dsp(lambda cost: cost.duration_s)
    measured = {
        f"int8 over torch FP32 on this CPU, {label}": _step_ratio(label)
        for label in ("VGG-11", "ResNet-18")
    }
    return _and_texts("figure-5", {**found, **measured}, "no rate in the catalogue")


def figure_6() -> Ours:
    """Return the joules of a batch over the DSP's."""
    return _and_texts(
        "figure-6", _over_the_dsp(lambda cost: cost.energy_j), "no rate in the catalogue"
    )


def figure_7() -> Ours:
    """Return the gains in seconds and joules by the size of the batch."""
    batches, labels = (4, 8, 16, 32, 64, 128), ("VGG-16", "InceptionV3")
    time, energy = (
        {
            batch: [
                value(batch_cost(label, method, batch=batch))
                / value(batch_cost(label, DSP, batch=batch))
                for label in labels
                for method in (MNN, MNN_INT8)
            ]
            for batch in batches
        }
        for value in (_seconds, _joules)
    )
    means = [mean(time[batch]) for batch in batches]
    return {
        "less on every batch": min(map(min, (*time.values(), *energy.values()))) > 1.0,
        "the gap grows with the batch": means == sorted(means),
        "less time, mean": mean(means),
        "less energy, mean": mean(map(mean, energy.values())),
        "less time, batch of 128, most": max(time[128]),
        "less energy, batch of 128, most": max(energy[128]),
    }


def table_7() -> Ours:
    """Return VGG-16's seconds and joules on the default core sets at the highest clock."""
    found: dict[str, float] = {}
    for method, cores in ((MNN, "BIG 4x"), (MNN_INT8, "BIG 4x"), (DSP, "BIG 2x")):
        cost = batch_cost("VGG-16", method)
        found[f"{method}/{cores}/H: time"] = cost.duration_s
        found[f"{method}/{cores}/H: energy"] = cost.energy_j
    own = {
        "MNN-INT8 over MNN-FP32, BIG 4x/H": found[f"{MNN_INT8}/BIG 4x/H: time"]
        / found[f"{MNN}/BIG 4x/H: time"],
        "FP32 over int8 on this CPU, VGG-11": _step_ratio("VGG-11"),
    }
    return _and_texts("table-7", {**found, **own}, "one core set")


def table_8a() -> Ours:
    """Return hours and watt-hours of 150 epochs, and the points that NITI loses in stored trainings."""
    found: dict[str, float] = {}
    for label, method in product(("VGG-11", "ResNet-18"), PROCESSORS):
        cost = centralised_cost(label, method)
        found[f"{label}/{method}: hours"] = cost.duration_s / 3600.0
        found[f"{label}/{method}: energy"] = cost.energy_j / 3600.0
    rows = stored_results(ACCURACIES)["rows"]
    lost = [
        mean(
            row["peer_value"] - row["ours"]
            for row in rows
            if row["case"].startswith(f"{model}, 20000 images of cifar10") and "niti" in row["case"]
        )
        for model in ("vgg-small", "resnet8")
    ]
    found |= {"points lost by INT8, least": min(lost), "points lost by INT8, most": max(lost)}
    return _and_texts("table-8a", found, "not trained")


_FEDERATED = {"LeNet": "FEMNIST", "VGG-16": "CIFAR-100"}


def table_8b() -> Ours:
    """Return hours of the paper's rounds, a client's watt-hours, the megabytes of a model, and trainings on digits."""
    found: dict[str, float] = {}
    for row in stored_results(FEDERATED)["rows"]:
        method, _, what = row["case"].partition(": ")
        found[f"LeNet on digits, 20 rounds/{method}: {what}"] = row["ours"]
    for label, method in product(_FEDERATED, PROCESSORS):
        cost = _federated(label, method)
        found[f"{label}/{method}: hours"] = cost.duration_s / 3600.0
        found[f"{label}/{method}: energy"] = cost.energy_j / 3600.0
        found[f"{label}/{method}: megabytes of a model"] = model_bytes(label, method) / 1e6
    return _and_texts("table-8b", found, "not trained")


def _federated(label: str, method: str) -> Cost:
    """Return a federated training of as many rounds as the paper has."""
    cells = {cell.key: cell.value for cell in read_paper("mandheling").item("table-8b").cells}
    return federated_cost(label, method, cells[f"{label}/{method}: rounds"] or 0.0)


def figure_8() -> Ours:
    """Return the gains of whole trainings over MNN, on one phone and federated."""
    found: dict[str, float] = {}
    for what, value in (("time", _seconds), ("energy", _joules)):
        over = {
            method: [
                value(centralised_cost(label, method)) / value(centralised_cost(label, DSP))
                for label in ("VGG-11", "ResNet-18")
            ]
            for method in (MNN, MNN_INT8)
        }
        found[f"one phone: less {what} than MNN-FP32, least"] = min(over[MNN])
        found[f"one phone: less {what} than MNN-FP32, most"] = max(over[MNN])
        found[f"one phone: less {what} than MNN-INT8, mean"] = mean(over[MNN_INT8])
        for label, data in _FEDERATED.items():
            ratio = value(_federated(label, MNN)) / value(_federated(label, DSP))
            found[f"{data}: less {what} than MNN-FP32"] = ratio
    return _and_texts("figure-8", found, "not trained")


def figure_9() -> Ours:
    """Return temperatures and clocks of an 865 in a rack at its fans' lowest speed."""
    soc, found = device(XIAOMI_10), {}
    for method, minutes in ((MNN, 2), (DSP, 18)):
        busy_w = soc.processor(PROCESSORS[method]).active_w
        experiment = Experiment(num_busy=40, busy_w=busy_w, idle_w=soc.idle_w)
        warmest_c, speed = temperature_after(experiment, constant("fan", "low_rpm"), 60.0 * minutes)
        found[f"{method}, {minutes} minutes"] = warmest_c
        found[f"{method}, {minutes} minutes: clock over the fastest"] = speed
    return found


def figure_10() -> Ours:
    """Return what each technique saves on this CPU, and the predicted seconds of ResNet-34 with all."""
    names = ("rescaling", "graph reuse", "batch splitting")
    found: dict[str, float | bool] = {
        f"ResNet-34: {name} saves": _saved(_ablation(name, "resnet18")[0]) for name in names
    }
    found["ResNet-34: co-scheduling saves"] = _saved(_ablation("placement")[0])
    found["ResNet-34: with all"] = batch_cost("ResNet-34", DSP, XIAOMI_10).duration_s
    small, large = (
        _saved(_ablation("batch splitting", model)[0]) for model in ("vgg11", "resnet18")
    )
    found["batch splitting saves less for VGG-11"] = small < large
    return _and_texts("figure-10", found, "techniques are always on")


def figure_11() -> Ours:
    """Return the gains of NITI on the DSP over both CPUs, and the accuracies of the three algorithms on digits."""
    found: dict[str, float] = {}
    for key, other in (("MNN-FP32", MNN), ("the same on the CPU", MNN_INT8)):
        found[f"NITI: less time than {key}"] = mean(
            batch_cost(label, other).duration_s / batch_cost(label, DSP).duration_s
            for label in ("VGG-11", "VGG-16")
        )
    for label in ("VGG-11", "VGG-16"):
        ratio = batch_cost(label, MNN).energy_j / batch_cost(label, DSP).energy_j
        found[f"{label}: less energy than MNN-FP32, mean"] = ratio
    for name, algorithm in _OF_FIGURE_11.items():
        accuracies = [_digits_accuracy(algorithm, seed) for seed in (1, 2, 3)]
        found[f"LeNet-5 on digits, 5 epochs: {name}"] = 100.0 * mean(accuracies)
    return _and_texts("figure-11", found, "no rate in the catalogue")


_OF_FIGURE_11 = {"FP32": None, "NITI": NITI, "MLS Format": MLS_FORMAT, "WAGEUBN": WAGEUBN}
_DIGIT_EPOCHS, _DIGIT_RATE = 5, 0.05


def _digits_accuracy(algorithm: TrainingAlgorithm | None, seed: int) -> float:
    """Train LeNet-5 on digits, in torch FP32 without an algorithm; return the part of the test digits that it knows."""
    data, random = load_data("digits"), np.random.default_rng(seed)
    module = build_model("lenet5", in_channels=1, image_size=28, num_classes=10, seed=seed)
    steps_per_epoch = len(data.train) // BATCH
    num_steps = _DIGIT_EPOCHS * steps_per_epoch
    every = [random.permutation(len(data.train)) for _ in range(_DIGIT_EPOCHS)]
    batches = np.concatenate([one[: steps_per_epoch * BATCH] for one in every]).reshape(-1, BATCH)
    images, labels = data.test.batch(np.arange(len(data.test)))
    if algorithm is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=_DIGIT_RATE, momentum=0.9)
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
        for batch in batches:
            own_images, own_labels = data.train.batch(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(own_images), own_labels).backward()
            optimizer.step()
            falling.step()
        with torch.no_grad():
            return float((module(images).argmax(1) == labels).double().mean())
    model = Int8Model.from_module(module, input_shape=(1, 28, 28), algorithm=algorithm)
    for step, batch in enumerate(batches):
        own_images, own_labels = data.train.batch(batch)
        model.train_step(
            own_images.numpy(),
            own_labels.numpy().astype(np.int32),
            learning_rate=_DIGIT_RATE * (1 - step / num_steps),
            progress=step / num_steps,
        )
    return model.evaluate(images.numpy(), labels.numpy().astype(np.int32)).accuracy


def practicality() -> Ours:
    """Return the seconds of 20,000 pictures on a Xiaomi 11 Pro."""
    seconds = 20_000 / BATCH * batch_cost("InceptionV3", DSP).duration_s
    found = {"20,000 pictures on a Snapdragon 888": seconds}
    return _and_texts("practicality", found, "no volts of the battery")


COMPUTE: Mapping[str, Callable[[], Ours]] = {
    "figure-1": figure_1, "dsp-peak": dsp_peak, "table-1": table_1, "table-2": table_2, "table-3": table_3,
    "scheduling": scheduling, "figure-4": figure_4, "rescaling": rescaling, "table-4": table_4,
    "preparation": preparation, "table-6": table_6, "figure-5": figure_5, "figure-6": figure_6, "figure-7": figure_7,
    "table-7": table_7, "table-8a": table_8a, "table-8b": table_8b, "figure-8": figure_8, "figure-9": figure_9,
    "figure-10": figure_10, "figure-11": figure_11, "practicality": practicality,
}  # fmt: skip


def _seconds(cost: Cost) -> float:
    return cost.duration_s


def _joules(cost: Cost) -> float:
    return cost.energy_j


def _over_the_dsp(value: Callable[[Cost], float]) -> dict[str, float | bool]:
    """Return least, most and mean of MNN's batches over Mandheling's, on all phones that have the processor."""

    def ratios(method: str, phones: Iterable[str]) -> list[float]:
        cells = product(_DRAWN, phones)
        return [
            value(batch_cost(label, method, phone)) / value(batch_cost(label, DSP, phone))
            for label, phone in cells
        ]

    over, flagships = ratios(MNN, PHONES), (XIAOMI_11, XIAOMI_10)
    return {
        "over MNN-FP32, least": min(over),
        "over MNN-FP32, most": max(over),
        "over MNN-INT8, most": max(ratios(MNN_INT8, flagships)),
        "over TFLite-FP32 and MNN-FP32, mean": mean(over),
        "less on the Redmi Note9 Pro": max(ratios(MNN, (REDMI,))) < min(ratios(MNN, flagships)),
    }


def _and_texts(item_id: str, found: Mapping[str, float | bool | str], text: str) -> Ours:
    """Return what was found, and a text for each cell that is not comparable and that nothing was found for."""
    cells = read_paper("mandheling").item(item_id).cells
    return {cell.key: text for cell in cells if cell.use == NOT_COMPARABLE} | dict(found)


def _ablation(technique: str, model: str = "") -> list[Mapping[str, float]]:
    rows = stored_results(ABLATION)["rows"]
    found = [row for row in rows if row["case"].startswith(technique) and model in row["case"]]
    assert found, f"{ABLATION} has no row of {technique} for {model}"
    return found


def _saved(row: Mapping[str, float]) -> float:
    """Return the percentage of a step's time that a technique saves."""
    return 100.0 * (1.0 - row["ours"] / row["peer_value"])


def _step_ratio(label: str) -> float:
    """Return torch's FP32 step over the int8 step on AVX2, as stored."""
    return float(stored_row(STEPS, f"avx2: {label} step", "ms")["ratio"])
