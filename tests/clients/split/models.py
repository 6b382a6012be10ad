"""Small models in two halves, made-up samples for them, and the same training undivided in plain torch."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from socflower.edgecloud.links.bandwidth_profile import constant
from socflower.edgecloud.plan.cuts import CutCost, SplitCosts, SplitPlan
from socflower.edgecloud.plan.party import Party
from socflower.edgecloud.samples import NO_LABELS, BatchOrder
from socflower.edgecloud.split_program import JoinedProgram, LayeredProgram, SplitProgram
from socflower.engines.local.workers import handle
from socflower.training.fp32 import sgd
from socflower.wire.split_message_keys import OWN
from socflower.workloads.data_source import DataSource, Indices
from socflower.workloads.models.classifiers import build_model
from tests.seeded import built
from tests.strategies.fake_messages import PulledReplies

SEED = 5
BATCHES_PER_EPOCH = 4


@dataclass(frozen=True)
class MadeSamples(DataSource):
    """Samples that are a function of a seed; `labelled` False is a party that knows no labels."""

    shape: tuple[int, ...]
    seed: int
    num_samples: int = 24
    num_classes: int = 10
    labelled: bool = True
    target_shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.as_tensor(indices)
        return self.inputs(rows), torch.from_numpy(self.labels(rows))

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        made = (
            np.random.default_rng([self.seed, 1])
            .normal(size=(self.num_samples, *self.shape))
            .astype(np.float32)
        )
        return torch.from_numpy(made)[rows]

    def labels(self, rows: torch.Tensor) -> NDArray[Any]:
        if not self.labelled:
            return NO_LABELS
        rng = np.random.default_rng(
            [7, self.num_samples]
        )  # parties of a joined training mean the same samples
        if self.target_shape:
            return rng.uniform(size=(self.num_samples, *self.target_shape)).astype(np.float32)[
                rows.numpy()
            ]
        return rng.integers(0, self.num_classes, self.num_samples)[rows.numpy()]


def layered(name: str = "lenet5", **settings: Any) -> LayeredProgram:
    """Return a network without random layers, so that nothing depends on how often streams are begun."""
    shape = (1, 28, 28) if name == "lenet5" else (3, 8, 8)

    def model() -> nn.Module:
        return build_model(
            name, in_channels=shape[0], image_size=shape[1], num_classes=10, seed=SEED
        )

    return LayeredProgram(
        **{"model_fn": model, "example": shape, "optimizer": sgd(0.05), "seed": SEED, **settings}
    )


def generator() -> LayeredProgram:
    """Return a model whose last layers see the data: its front half is in the cloud."""

    def model() -> nn.Module:
        return built(
            lambda: nn.Sequential(
                nn.Linear(4, 8),
                nn.ReLU(),
                nn.Linear(8, 8),
                nn.ReLU(),
                nn.Linear(8, 6),
                nn.Sigmoid(),
            ),
            SEED,
        )

    return LayeredProgram(
        model_fn=model,
        example=(4,),
        optimizer=sgd(0.05),
        loss=functional.mse_loss,
        reverse=True,
        seed=SEED,
    )


class TwoBottoms(nn.Module):
    """A model whose parties know different things of the same samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bottoms = nn.ModuleList(
            [nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Linear(5, 4), nn.Tanh())]
        )
        self.top = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.top(
            torch.cat(
                [bottom(part) for bottom, part in zip(self.bottoms, parts, strict=True)], dim=1
            )
        )


def joined() -> JoinedProgram:
    def model() -> nn.Module:
        return built(TwoBottoms, SEED)

    return JoinedProgram(
        model_fn=model,
        examples=(torch.zeros(1, 3), torch.zeros(1, 5)),
        bottoms=("bottoms.0", "bottoms.1"),
        top="top",
        optimizer=sgd(0.05),
        seed=SEED,
    )


def samples_of(program: SplitProgram, party: int) -> MadeSamples:
    """Return what an edge holds: samples of its own, or its own features of everybody's."""
    if isinstance(program, JoinedProgram):
        return MadeSamples((3, 5)[party : party + 1], party, num_classes=3, labelled=party == 0)
    assert isinstance(program, LayeredProgram)
    if program.reverse:
        return MadeSamples((4,), 0, target_shape=(6,))
    return MadeSamples(program.example, party, num_samples=24 + 4 * party)


def codes_of(program: SplitProgram, party: int, num_parties: int) -> MadeSamples:
    """Return what the cloud has in a reverse split."""
    return MadeSamples((4,), 0, labelled=False)


def local_training(
    program: LayeredProgram | JoinedProgram, num_batches: int
) -> dict[str, NDArray[Any]]:
    """Return the weights of the undivided model, trained on the same batches as anyone would in torch."""
    model = program.model()
    model.train()
    updates = program.optimizer(model.parameters())
    parties = program.num_parties or 1
    holders = [samples_of(program, party) for party in range(parties)]
    order = BatchOrder(len(holders[0]), BATCHES_PER_EPOCH, SEED)
    for batch in range(num_batches):
        rows = order.rows(batch)
        parts = [holder.inputs(torch.from_numpy(rows)) for holder in holders]
        updates.zero_grad()
        outputs = model(parts if isinstance(program, JoinedProgram) else parts[0])
        program.loss(
            outputs, torch.from_numpy(holders[0].labels(torch.from_numpy(rows)))
        ).backward()
        updates.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def parties_of(
    program: SplitProgram,
    num_parties: int = 1,
    *,
    cut: int | None = 0,
    window: int = 0,
    bits: int = 32,
    **changes: Any,
) -> list[Party]:
    """Return edges with links that are no hindrance; every cut costs the same."""
    made = []
    for party in range(num_parties):
        names = program.cut_names(party if program.num_parties else 0)
        costs = SplitCosts(
            model="made",
            batch_size=6,
            edge_only_s=0.04,
            model_weight_bytes=1e6,
            cuts=tuple(
                CutCost(
                    name=name,
                    edge_forward_s=0.01,
                    edge_backward_s=0.01,
                    cloud_s=0.01,
                    feature_elements=100,
                    front_weight_bytes=1000.0,
                )
                for name in names
            ),
        )
        made.append(
            Party(
                costs=costs,
                bandwidth_profile=constant(1e6, 1e6),
                split_plan=SplitPlan(cut=cut, bits=bits, window=window),
                window=lambda batch: window,
                **changes,
            )
        )
    return made


def task_settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a `SplitTask` of one edge."""
    return {
        "parties": (0,),
        "num_parties": 1,
        "mode": OWN,
        "reverse": False,
        "first_batch": 0,
        "num_batches": 4,
        "total_batches": 8,
        "batches_per_epoch": BATCHES_PER_EPOCH,
        "seed": SEED,
        "cuts": (0,),
        "bits": (32,),
        "windows": (0,),
        "gradient_bits": 32,
        **changes,
    }


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a lock that lets one thread in."""
    lock = threading.Lock()

    @wraps(function)
    def locked(*args: Any, **settings: Any) -> Any:
        with lock:
            return function(*args, **settings)

    return locked


class ThreadGrid(PulledReplies):
    """A Flower Grid whose nodes are threads of this process, all at once, as joined parties must be."""

    def __init__(self, apps: Sequence[ClientApp], *, silent: Iterable[int] = ()) -> None:
        self._apps = dict(zip(self.get_node_ids_of(len(apps)), apps, strict=True))
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": index},
                state=RecordDict(),
                run_config={},
            )
            for index, node in enumerate(self._apps)
        }
        self.silent = set(silent)  # nodes that do not answer
        self.asked: list[Message] = []

    @staticmethod
    def get_node_ids_of(count: int) -> list[int]:
        return [10 * (index + 1) for index in range(count)]

    def get_node_ids(self) -> list[int]:
        return list(self._apps)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies: list[Message] = []
        asked = [message for message in messages if message.metadata.dst_node_id not in self.silent]
        self.asked += asked
        threads = [
            threading.Thread(
                target=lambda one=message: replies.append(self._answer(one)), daemon=True
            )
            for message in asked
        ]
        # Python 3.11 may raise SystemError where two threads parse at once, as NumPy does with the header of an array
        # (python/cpython#106905). Flower itself runs every client in a process of its own.
        with patch.object(Array, "numpy", one_at_a_time(Array.numpy)):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "a client does not come to an end"
        return replies

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        return handle(self._apps[node], message, self.contexts[node])


def differing(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return the names of tensors that are not the same, bit for bit."""
    assert set(found) == set(expected)
    return [
        name
        for name, array in expected.items()
        if np.asarray(found[name]).tobytes() != array.tobytes()
    ]
