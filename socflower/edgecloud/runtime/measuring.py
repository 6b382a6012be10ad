"""Measures costs of a batch at every cut on this device by running the halves (the paper's profiler, §5.2)."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from pydantic import Field, TypeAdapter

from socflower.cluster.cost_model import ModelProfile
from socflower.edgecloud.half_protocols import Array
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.front import TorchFront
from socflower.errors import ConfigError
from socflower.field_rules import checked
from socflower.model_graph.cut_points import CutPoint, SplitModel
from socflower.model_graph.layer_profile import profile_module
from socflower.model_graph.tensor_arrays import tensor_bytes, to_array
from socflower.model_graph.torch_device import settle
from socflower.toml_file import read_table
from socflower.training.session import OptimizerFn
from socflower.wire.codecs.error_feedback import ErrorFeedback, Form
from socflower.wire.codecs.quantisation import decode, encode

_FORMAT = {"schema": 1, "kind": "split-costs"}
_COSTS = TypeAdapter(SplitCosts)
_CPU = torch.device("cpu")
_Count: TypeAlias = Annotated[int, Field(ge=1)]


@checked
class Measuring:
    """Settings of a measurement: each timed function first runs `num_warm_ups` times; the result is a median.

    With `at_least_s` each of the `num_repeats` timings is the mean over the runs in that time: if a quota stops the
    processor from time to time, most short runs are not interrupted, and their median would be too small.

    Before each run `evict_bytes` of memory are touched, which is not timed: in training, features and gradients pass
    through the stream between two passes of a half, so that no cache holds the data of the last pass.
    """

    optimizer: OptimizerFn
    batch_size: _Count
    num_repeats: _Count = 5
    num_warm_ups: _Count = 2
    at_least_s: Annotated[float, Field(ge=0)] = 0.0
    evict_bytes: Annotated[int, Field(ge=0)] = 16 << 20
    device: torch.device = _CPU
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median of the seconds that `work` takes."""
        for _ in range(self.num_warm_ups):
            work()
        other = np.zeros(self.evict_bytes, np.uint8)
        times_s: list[float] = []
        for _ in range(self.num_repeats):
            num_runs = 0
            passed_s = 0.0
            while num_runs == 0 or passed_s < self.at_least_s:
                other += 1
                settle(self.device)
                start_s = self.clock()
                work()
                # An accelerator is still working after the call.
                settle(self.device)
                passed_s += self.clock() - start_s
                num_runs += 1
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

    Every front half is timed as a whole, since the times of single layers do not add up (`measure_front`). `cloud_s`
    is the result of `measure_cloud` in the cloud; without it, this device is measured. Codec times are per element:
    encoding the largest features, with error feedback if there is any, and decoding as large a gradient. Medians that
    decrease from cut to cut, which can only be noise, are smoothed (`monotone`). Memory is computed: weights, gradients
    and optimiser state of trained layers, and one batch's outputs of all layers that are not frozen. `label_bytes` is
    per sample. A copy of the model is run; the model itself is unchanged.

    Raises `ConfigError` if `cloud_s` is of another number of cuts.
    """
    runs = [measure_front(split, cut, how) for cut in range(split.num_cuts + 1)]
    profile = profile_module(split.model, split.samples(1).cpu(), split.name)
    if cloud_s is None:
        cloud_s = measure_cloud(split, how)
    if len(cloud_s) != split.num_cuts:
        raise ConfigError(
            f"model {split.name}: {len(cloud_s)} seconds of the cloud for {split.num_cuts} cuts"
        )
    all_bytes = float(tensor_bytes(split.specs.values()))
    trained_bytes = sum(layer.weight_bytes for layer in profile.layers)
    alone_bytes = all_bytes + trained_bytes + _kept_bytes(split, profile, how, None)
    return SplitCosts(
        model=split.name,
        batch_size=how.batch_size,
        cuts=_cut_costs(split, how, profile, runs, cloud_s),
        edge_only_s=monotone([run.training_s for run in runs])[-1],
        edge_only_memory_bytes=alone_bytes + runs[-1].state_bytes,
        label_bytes=label_bytes * how.batch_size,
        codec_s_per_element=measure_codec(
            split,
            how,
            bits=bits,
            feedback=feedback,
        ),
        decode_s_per_element=measure_decode(split, how, bits=bits),
        model_weight_bytes=all_bytes + runs[-1].state_bytes,
    )


def _cut_costs(
    split: SplitModel,
    how: Measuring,
    profile: ModelProfile,
    runs: Sequence["FrontCost"],
    cloud_s: Sequence[float],
) -> tuple[CutCost, ...]:
    forward_s = monotone([run.forward_s for run in runs])
    training_s = monotone([run.training_s for run in runs])
    cuts: list[CutCost] = []
    for index, point in enumerate(split.cuts):
        moving_bytes = point.front_weight_bytes + runs[index].state_bytes
        kept_bytes = _kept_bytes(split, profile, how, point)
        backward_s = max(0.0, training_s[index] - forward_s[index]) if point.front_trains else 0.0
        cost = CutCost(
            name=point.name,
            edge_forward_s=forward_s[index],
            edge_backward_s=backward_s,
            cloud_s=cloud_s[index],
            feature_elements=point.feature_elements * how.batch_size,
            front_weight_bytes=moving_bytes,
            edge_memory_bytes=moving_bytes + point.front_trained_bytes + kept_bytes,
            front_trains=point.front_trains,
        )
        cuts.append(cost)
    return tuple(cuts)


def _kept_bytes(
    split: SplitModel, profile: ModelProfile, how: Measuring, point: CutPoint | None
) -> float:
    """Return the bytes of a batch's outputs in a front half, or in the whole model, without frozen layers."""
    outputs_bytes = [
        layer.output_bytes
        for layer in profile.layers
        if layer.name not in split.frozen_layers
        and (point is None or layer.name in point.front_layers)
    ]
    return sum(outputs_bytes) * how.batch_size


@dataclass(frozen=True, slots=True)
class FrontCost:
    """The costs of a front half at one cut; for the whole model both durations are those of a training step.

    `training_s` is forward pass, backward pass and update; `state_bytes` are the optimiser's.
    """

    forward_s: float
    training_s: float
    state_bytes: float


def measure_front(split: SplitModel, cut: int, how: Measuring) -> FrontCost:
    """Return the costs of a front half as it runs in training, with the copies into and out of arrays.

    Three timings of two unknowns: the forward pass without a graph; forward, backward and update together; and the same
    with a replay, which is another forward pass.
    """
    samples = split.samples(how.batch_size)
    ids = np.arange(how.batch_size, dtype=np.int64)
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
    parts_s = both_parts(forward_s, training_s, replaying_s)
    return FrontCost(*parts_s, half.state_bytes)


def both_parts(first_s: float, second_s: float, sum_s: float) -> tuple[float, float]:
    """Return two durations from timings of both and of their sum, by least squares of relative errors; 0 or more."""
    timed_s = np.array([first_s, second_s, sum_s])
    if timed_s.min() <= 0.0:
        # Below the resolution of the clock.
        return first_s, second_s
    parts = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    first, second = np.linalg.lstsq(
        parts / timed_s[:, None],
        np.ones(3),
        rcond=None,
    )[0]
    # One interruption of a short measurement can make the other part negative.
    return max(0.0, float(first)), max(0.0, float(second))


def measure_cloud(split: SplitModel, how: Measuring) -> tuple[float, ...]:
    """Return the seconds that this device needs for the back half of every cut: forward, backward and update."""
    rng = np.random.default_rng(0)
    labels = np.zeros(how.batch_size, np.int64)
    seconds: list[float] = []
    for cut, point in enumerate(split.cuts):
        half = TorchBack(
            split.copy(),
            cut,
            how.optimizer,
            _mean_square,
            schedule=_no_rate,
            device=how.device,
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

    widths = [width for width in bits if width < 32]
    return {width: how.seconds(partial(pass_through, width)) / features.size for width in widths}


def measure_decode(split: SplitModel, how: Measuring, *, bits: Sequence[int]) -> dict[int, float]:
    """Return the seconds for decoding an element of a gradient by bits, timed on the largest of a batch."""
    gradient = _largest_features(split, how)
    encoded = {width: encode(gradient, width) for width in bits if width < 32}
    return {
        width: how.seconds(partial(decode, each)) / gradient.size for width, each in encoded.items()
    }


def _largest_features(split: SplitModel, how: Measuring) -> Array:
    shape = max((point.feature_shape for point in split.cuts), key=math.prod)
    generator = torch.Generator().manual_seed(0)
    return to_array(torch.relu(torch.randn(how.batch_size, *shape, generator=generator)))


def monotone(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` by least squares (pool adjacent violators)."""
    # Means and sizes of the pools, which rise.
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            right, num_right = pools.pop()
            left, num_left = pools.pop()
            num = num_left + num_right
            pools.append(((left * num_left + right * num_right) / num, num))
    return [mean for mean, num in pools for _ in range(num)]


def to_document(costs: SplitCosts) -> dict[str, Any]:
    """Return costs as a JSON object."""
    return {**_FORMAT, **_COSTS.dump_python(costs, mode="json")}


def from_document(document: Mapping[str, Any]) -> SplitCosts:
    """Return the costs that `to_document` was given; `ConfigError` for anything else."""
    found = {key: document.get(key) for key in _FORMAT}
    if found != _FORMAT:
        raise ConfigError(f"split costs: {found} should be {_FORMAT}; measure again")
    content = {key: value for key, value in document.items() if key not in _FORMAT}
    try:
        return read_table(SplitCosts, content, "split costs")
    except ConfigError as error:
        raise ConfigError(f"{error}; measure again") from None


def _no_rate(batch: int) -> float:
    """Return 0: an update takes the same time, but neither weights nor the range of computed values change."""
    return 0.0


def _mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()
