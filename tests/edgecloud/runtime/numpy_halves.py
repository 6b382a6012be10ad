"""A small network in NumPy with momentum, cut anywhere: every batch that is lost or repeated changes its weights.

Run as a program it is one side of a split training in a process of its own, to be killed.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.session import CloudHalf, HostedFront, SessionTerms
from socflower.edgecloud.half_protocols import Array, Weights
from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.runtime.front_loop import FrontPlan
from socflower.edgecloud.runtime.span_training import BatchSpan, train_front
from socflower.edgecloud.stream.credentials import run_token
from socflower.errors import ConfigError
from socflower.wire.arrays import pack_arrays, unpack_arrays

SIZES = (6, 7, 5, 4, 3)
NUM_LAYERS = len(SIZES) - 1
RATE, MOMENTUM = np.float32(0.1), np.float32(0.9)
OPERATOR, FINGERPRINT = "operator-token-0123", "model-of-the-tests"


class Layers:
    """A stretch of layers with their momentum, which travels with them."""

    def __init__(
        self, layers: range, seed: int = 0, *, first: int = 0, last: int = NUM_LAYERS
    ) -> None:
        self.weight: dict[int, Array] = {}
        self.speed: dict[int, Array] = {}
        self.ends = (first, last)
        for layer in layers:
            made = (
                np.random.default_rng([seed, layer])
                .normal(0, 0.5, SIZES[layer : layer + 2])
                .astype(np.float32)
            )
            self.weight[layer], self.speed[layer] = made, np.zeros_like(made)

    def forward(self, value: Array) -> list[Array]:
        values = [value]
        for layer in sorted(self.weight):
            values.append(np.tanh(values[-1] @ self.weight[layer]))
        return values

    def backward(self, values: list[Array], gradient: Array) -> Array:
        for at, layer in reversed(list(enumerate(sorted(self.weight)))):
            inner = gradient * (np.float32(1) - values[at + 1] ** 2)
            gradient = inner @ self.weight[layer].T
            self.speed[layer] = MOMENTUM * self.speed[layer] + values[at].T @ inner
            self.weight[layer] = self.weight[layer] - RATE * self.speed[layer]
        return gradient

    def weights(self) -> dict[str, NDArray[Any]]:
        return {f"layer{layer}": self.weight[layer] for layer in sorted(self.weight)}

    def _put(self, moving: Mapping[str, NDArray[Any]]) -> None:
        for name, array in moving.items():
            place = self.speed if name.endswith("::speed") else self.weight
            place[int(name.removesuffix("::speed")[5:])] = array

    def _take_out(self, layers: range) -> dict[str, NDArray[Any]]:
        moving: dict[str, NDArray[Any]] = {}
        for layer in layers:
            moving[f"layer{layer}"] = self.weight.pop(layer)
            moving[f"layer{layer}::speed"] = self.speed.pop(layer)
        return moving

    def save(self) -> bytes:
        return b"".join(
            pack_arrays(
                {
                    **self.weights(),
                    **{f"layer{layer}::speed": self.speed[layer] for layer in sorted(self.speed)},
                }
            )
        )

    def restore(self, saved: bytes) -> None:
        self.weight.clear()
        self.speed.clear()
        self._put(unpack_arrays(memoryview(saved)))


class Front(Layers):
    feature_quantum = None

    def __init__(
        self,
        cut: int = 1,
        seed: int = 0,
        *,
        first: int = 0,
        labels: bool = True,
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(range(first, cut + 1), seed, first=first)
        self.seed, self.pause_s, self.has_labels = seed, pause_s, labels
        self._kept: dict[int, list[Array]] = {}
        self.forwards: list[int] = []
        self.applied: list[int] = []

    @property
    def cut(self) -> int:
        return max(self.weight)

    def export_layers(self, cut: int) -> Weights:
        return self._take_out(range(cut + 1, self.cut + 1))

    def import_layers(self, cut: int, weights: Weights) -> None:
        self._put(weights)
        if self.cut != cut:
            raise ConfigError(f"cut {cut} does not fit")

    def forward(self, batch: int, *, keep_graph: bool = False) -> Array:
        time.sleep(self.pause_s)
        self.forwards.append(batch)
        values = Layers.forward(self, inputs(batch, self.seed))
        if keep_graph:
            self._kept[batch] = values
        return values[-1]

    def labels(self, batch: int) -> NDArray[Any]:
        return targets(batch, self.seed) if self.has_labels else np.empty(0, np.float32)

    def sample_ids(self, batch: int) -> NDArray[np.int64]:
        return np.arange(8 * batch, 8 * batch + 8) % 40

    def apply(self, batch: int, gradient: Array | None) -> None:
        values = self._kept.pop(batch, None) or Layers.forward(self, inputs(batch, self.seed))
        self.applied.append(batch)
        if gradient is not None:
            self.backward(values, gradient)


class Back(Layers):
    def __init__(
        self,
        cut: int = 1,
        seed: int = 0,
        *,
        pause_s: float = 0.0,
        goal: Callable[[int], Array] | None = None,
        fails_at: int = -1,
    ) -> None:
        super().__init__(range(cut + 1, NUM_LAYERS), seed)
        self.pause_s, self.goal, self.fails_at = pause_s, goal, fails_at
        self.steps: list[int] = []

    @property
    def cut(self) -> int:
        return min(self.weight) - 1

    def export_layers(self, cut: int) -> Weights:
        return self._take_out(range(self.cut + 1, cut + 1))

    def import_layers(self, cut: int, weights: Weights) -> None:
        self._put(weights)
        if self.cut != cut:
            raise ConfigError(f"cut {cut} does not fit")

    def step(
        self, batch: int, features: Sequence[Array], labels: NDArray[Any]
    ) -> tuple[list[Array | None], float]:
        time.sleep(self.pause_s)
        if batch == self.fails_at:
            raise ValueError("a half that\nbreaks")
        self.steps.append(batch)
        values = Layers.forward(self, sum(features[1:], features[0]))
        error = values[-1] - (self.goal(batch) if self.goal is not None else labels)
        gradient = self.backward(values, error * np.float32(2 / error.size))
        return [gradient for _ in features], float((error**2).mean())


def inputs(batch: int, seed: int) -> Array:
    return np.random.default_rng([seed, 1000, batch]).normal(size=(8, SIZES[0])).astype(np.float32)


def targets(batch: int, seed: int) -> Array:
    return np.tanh(np.random.default_rng([seed, 2000, batch]).normal(size=(8, SIZES[-1]))).astype(
        np.float32
    )


def local_training(num_batches: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """The weights of the whole network trained in one place."""
    whole = Layers(range(NUM_LAYERS), seed)
    for batch in range(num_batches):
        values = whole.forward(inputs(batch, seed))
        error = values[-1] - targets(batch, seed)
        whole.backward(values, error * np.float32(2 / error.size))
    return whole.weights()


def same(*sides: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the sides' weights together are those wanted, bit for bit."""
    found = {name: array for side in sides for name, array in side.items()}
    return found.keys() == wanted.keys() and all(
        found[name].tobytes() == wanted[name].tobytes() for name in wanted
    )


def make_half(terms: SessionTerms, weights: Weights) -> CloudHalf:
    """The factory of the tests' clouds."""
    settings = terms.settings
    if "refuse" in settings:
        raise ConfigError("settings: refuse is set; leave it out")
    if terms.reverse:
        plan = FrontPlan(
            split_plan=SplitPlan(cut=1, window=settings.get("window", 0)),
            checkpoint_batches=settings.get("checkpoint_batches", 0),
        )
        return HostedFront(
            half=Front(labels=False, pause_s=settings.get("pause_s", 0.0)), plan=plan
        )
    back = Back(pause_s=settings.get("pause_s", 0.0), fails_at=settings.get("fails_at", -1))
    if weights:
        back.restore(b"".join(pack_arrays(weights)))
    return back


def connect(port: int, run_id: str = "run", **options: Any) -> EdgeConnection:
    options = {
        "token": run_token(OPERATOR, run_id),
        "fingerprint": FINGERPRINT,
        "give_up_s": 30.0,
        "patience_s": 30.0,
        **options,
    }
    return EdgeConnection(f"127.0.0.1:{port}", run_id=run_id, **options)


def main(role: str, port: int, folder: Path, settings: dict[str, Any]) -> None:
    """A cloud that serves until it is killed, or an edge that trains a span and prints its weights' bytes as hex."""
    if role == "cloud":
        with_port = CloudService(
            f"127.0.0.1:{port}", make_half, operator_token=OPERATOR, folder=folder
        )
        print(with_port.port, flush=True)
        time.sleep(120)
        return
    front = Front(pause_s=settings.get("pause_s", 0.0))
    plan = FrontPlan(
        split_plan=SplitPlan(cut=1),
        checkpoint_batches=settings.get("checkpoint_batches", 0),
        progress=lambda done: print(done.batch, flush=True),
    )
    report = train_front(
        connect(port),
        front,
        BatchSpan(first_batch=0, num_batches=settings["num_batches"]),
        plan,
        folder=folder,
    )
    print(json.dumps({"first": report.first_batch, "saved": front.save().hex()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
