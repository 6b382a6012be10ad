"""Measures costs of a batch at every cut on this device by running the halves (the paper's profiler, §5.2)."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.half_optimizer import OptimizerFactory
from socflower.errors import ConfigError, require_range
from socflower.model_graph.cut_points import SplitModel
from socflower.model_graph.layer_profile import profile_module
from socflower.model_graph.tensor_arrays import to_array
from socflower.model_graph.torch_device import settle
from socflower.wire.codecs.error_feedback import ErrorFeedback, Form
from socflower.wire.codecs.quantisation import decode, encode

SCHEMA = 1
_KIND = "split-costs"
_COSTS = TypeAdapter(SplitCosts)
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """Settings of a measurement: each timed function first runs `num_warm_ups` times; the result is a median.

    With `at_least_s` each of the `num_repeats` timings is the mean over the runs in that time: if a quota stops the
    processor from time to time, most short runs are not interrupted, and their median would be too small.

    Before each run `evict_bytes` of memory are touched, which is not timed: in training features and gradients pass
    through the stream between two passes of a half, so that no cache holds what the last pass left.
    """

    optimizer: OptimizerFactory
    batch_size: int
    num_repeats: int = 5
    num_warm_ups: int = 2
    at_least_s: float = 0.0
    evict_bytes: int = 16 << 20
    device: torch.device = _CPU
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        require_range(
            "measuring", least=0, at_least_s=self.at_least_s, evict_bytes=self.evict_bytes
        )
        require_range(
            "measuring",
            least=1,
            batch_size=self.batch_size,
            num_repeats=self.num_repeats,
            num_warm_ups=self.num_warm_ups,
        )

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median of the seconds that `work` takes."""
        for _ in range(self.num_warm_ups):
            work()
        other = np.zeros(self.evict_bytes, np.uint8)
        times_s: list[float] = []
        for _ in range(self.num_repeats):
            num_runs, passed_s = 0, 0.0
            while num_runs == 0 or passed_s < self.at_least_s:
                other += 1
                settle(self.device)
                start_s = self.clock()
                work()
                settle(self.device)
                num_runs, passed_s = num_runs + 1, passed_s + self.clock() - start_s
            times_s.append(passed_s / num_runs)
        return statistics.median(times_s)


def measure_costs(
    split: SplitModel,
    how: Measuring,
    *,
    cloud_s: Sequence[float] | None = None,
    bits: Sequence[int] = (2, 4, 8, 16),
    feedback: Form = "none",
    label_bytes: float = 8.0,
) -> SplitCosts:
    """Return the costs of a batch at every cut, with this device as the edge.

    A front half is timed as a whole and as it runs, since the times of single layers do not add up: the forward pass
    without graph; forward, backward and update together; and the same with a replay, which is a forward pass more:
    three timings of two unknowns, by least squares. `cloud_s` is the result of
    `measure_cloud` in the cloud; without it, this device is measured. Codec times are per element, for encoding the
    largest features and, with error feedback, for its additional work, and for decoding as large a gradient. Medians
    that decrease from cut to cut, which can only be noise, are smoothed (`monotone`). Memory is computed: weights,
    gradients and optimiser state of trained layers, and one batch's outputs of all layers that are not frozen.
    `label_bytes` is per sample. A copy of the model is run; the model itself is unchanged.
    """
    samples = split.samples(1)
    runs = [measure_front(split, cut, how) for cut in range(split.num_cuts + 1)]
    forward_s = monotone([run.forward_s for run in runs])
    training_s = monotone([run.training_s for run in runs])
    profile = profile_module(split.model, samples.cpu(), split.name)
    if cloud_s is None:
        cloud_s = measure_cloud(split, how)
    if len(cloud_s) != split.num_cuts:
        raise ConfigError(
            f"model {split.name}: {len(cloud_s)} seconds of the cloud for {split.num_cuts} cuts; measure "
            "the same model there"
        )
    cuts: list[CutCost] = []
    for index, point in enumerate(split.cuts):
        output_bytes = sum(
            layer.output_bytes
            for layer in profile.layers
            if layer.name in point.front_layers - split.frozen_layers
        )
        trained_bytes = point.front_trained_bytes
        cuts.append(
            CutCost(
                name=point.name,
                edge_forward_s=forward_s[index],
                edge_backward_s=max(0.0, training_s[index] - forward_s[index])
                if point.front_trains
                else 0.0,
                cloud_s=cloud_s[index],
                feature_elements=point.feature_elements * how.batch_size,
                front_weight_bytes=point.front_weight_bytes + runs[index].state_bytes,
                edge_memory_bytes=(
                    point.front_weight_bytes
                    + trained_bytes
                    + runs[index].state_bytes
                    + output_bytes * how.batch_size
                ),
                front_trains=point.front_trains,
            )
        )
    trained_bytes = sum(layer.weight_bytes for layer in profile.layers)
    output_bytes = sum(
        layer.output_bytes for layer in profile.layers if layer.name not in split.frozen_layers
    )
    all_bytes = float(sum(form.numel() * form.element_size() for form in split.specs.values()))
    return SplitCosts(
        model=split.name,
        batch_size=how.batch_size,
        cuts=tuple(cuts),
        edge_only_s=training_s[-1],
        edge_only_memory_bytes=all_bytes
        + trained_bytes
        + runs[-1].state_bytes
        + output_bytes * how.batch_size,
        label_bytes=label_bytes * how.batch_size,
        codec_s_per_element=measure_codec(split, how, bits=bits, feedback=feedback),
        decode_s_per_element=measure_decode(split, how, bits=bits),
        model_weight_bytes=all_bytes + runs[-1].state_bytes,
    )


@dataclass(frozen=True, slots=True)
class FrontCost:
    """What a front half takes at one cut; all of a step's seconds for a half that is the whole model."""

    forward_s: float
    training_s: float  # forward, backward, update
    state_bytes: float  # of the optimiser


def measure_front(split: SplitModel, cut: int, how: Measuring) -> FrontCost:
    """Return the costs of a front half as it runs in training: with the copies into and out of arrays."""
    samples, ids = split.samples(how.batch_size), np.arange(how.batch_size, dtype=np.int64)
    half = TorchFront(
        split.copy(),
        cut,
        lambda batch: (samples, ids, ids),
        how.optimizer,
        schedule=_no_rate,
        device=how.device,
        loss=_mean_square,
    )
    if cut == split.num_cuts:
        training_s = how.seconds(lambda: half.train_alone(0))
        return FrontCost(training_s, training_s, half.state_bytes)

    def forward() -> Array:
        features = half.forward(0)
        half.apply(0, None)
        return features

    forward_s = how.seconds(forward)
    if not split.front_trains(cut):
        return FrontCost(forward_s, forward_s, 0.0)
    gradient = np.random.default_rng(0).random(forward().shape, dtype=np.float32)

    def train(*, keep_graph: bool) -> None:
        half.forward(0, keep_graph=keep_graph)
        half.apply(0, gradient)

    training_s, replaying_s = (
        how.seconds(partial(train, keep_graph=keep)) for keep in (True, False)
    )
    return FrontCost(*both_parts(forward_s, training_s, replaying_s), half.state_bytes)


def both_parts(first_s: float, second_s: float, sum_s: float) -> tuple[float, float]:
    """Return two durations of which both and their sum were timed, each with an error in proportion (least squares)."""
    if min(first_s, second_s, sum_s) <= 0.0:  # below what the clock can tell
        return first_s, second_s
    timed = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) / np.array(
        [[first_s], [second_s], [sum_s]]
    )
    first, second = np.linalg.lstsq(timed, np.ones(3), rcond=None)[0]
    return float(first), float(second)


def measure_cloud(split: SplitModel, how: Measuring) -> tuple[float, ...]:
    """Return the seconds that this device needs for the back half of every cut: forward, backward and update."""
    rng = np.random.default_rng(0)
    labels = np.zeros(how.batch_size, np.int64)
    seconds: list[float] = []
    for cut, point in enumerate(split.cuts):
        half = TorchBack(
            split.copy(), cut, how.optimizer, _mean_square, schedule=_no_rate, device=how.device
        )
        features = rng.random((how.batch_size, *point.feature_shape), dtype=np.float32)
        seconds.append(how.seconds(partial(half.step, 0, [features], labels)))
    return tuple(reversed(monotone(seconds[::-1])))


def measure_codec(
    split: SplitModel, how: Measuring, *, bits: Sequence[int], feedback: Form
) -> dict[int, float]:
    """Return the codec's seconds per feature element by bits, timed on the largest features of a batch."""
    features = _largest_features(split, how)

    def pass_through(width: int) -> None:
        encoded = encode(features, width)
        if feedback != "none":
            errors = ErrorFeedback(feedback)
            errors.keep(0, features, decode(encoded))
            errors.correct(0, features)

    return {
        width: how.seconds(partial(pass_through, width)) / features.size
        for width in bits
        if width < 32
    }


def measure_decode(split: SplitModel, how: Measuring, *, bits: Sequence[int]) -> dict[int, float]:
    """Return the seconds for decoding an element of a gradient by bits, timed on the largest of a batch."""
    gradient = _largest_features(split, how)
    return {
        width: how.seconds(partial(decode, encode(gradient, width))) / gradient.size
        for width in bits
        if width < 32
    }


def _largest_features(split: SplitModel, how: Measuring) -> Array:
    shape = max((point.feature_shape for point in split.cuts), key=math.prod)
    return to_array(
        torch.relu(torch.randn(how.batch_size, *shape, generator=torch.Generator().manual_seed(0)))
    )


def monotone(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` by least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, num_left), (right, num_right) = pools[-2:]
            num = num_left + num_right
            pools[-2:] = [((left * num_left + right * num_right) / num, num)]
    return [mean for mean, num in pools for _ in range(num)]


def to_document(costs: SplitCosts) -> dict[str, Any]:
    """Return costs as a JSON-compatible dict."""
    return {"schema": SCHEMA, "kind": _KIND, **_COSTS.dump_python(costs, mode="json")}


def from_document(document: Mapping[str, Any]) -> SplitCosts:
    """Return the costs that `to_document` wrote; `ConfigError` for anything else."""
    if document.get("kind") != _KIND or document.get("schema") != SCHEMA:
        raise ConfigError(
            f"split costs: kind {document.get('kind')!r} with schema {document.get('schema')!r}, it "
            f"should be {_KIND!r} with schema {SCHEMA}; measure again"
        )
    content = {key: value for key, value in document.items() if key not in ("schema", "kind")}
    try:
        return _COSTS.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"split costs: {'.'.join(map(str, first['loc']))}: {first['msg']}; measure again"
        ) from None


def _no_rate(batch: int) -> float:
    """With rate 0 an update takes the same time, but the weights and the range of computed values do not change."""
    return 0.0


def _mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()
