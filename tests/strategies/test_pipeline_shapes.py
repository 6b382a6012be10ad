"""Samples of other shapes than the plan's: trained where no cut depends on it, else one line with both shapes."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from socflower import (
    FP32Trainer,
    HybridPipeline,
    TrainingSchedule,
    make_client_app,
    parse_cluster,
    pipeline_problem,
    sgd,
)
from socflower.engines.local.grid import LocalGrid
from socflower.errors import TrainingFailed
from tests.pipeline.problems import straight_plan
from tests.seeded import built

CLUSTER = parse_cluster(
    {"boards": 2, "socs_per_board": 1, "device": "raspberry-pi-4b", "soc_bytes_per_s": 1e7}
)
PLANNED = 7
NUM_SAMPLES = 16


class Words(Dataset[tuple[Tensor, int]]):
    """Sentences of some lengths, the first of which is that of sample 0."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length = self.lengths[index % len(self.lengths)]
        return torch.randint(
            1, 16, (length,), generator=torch.Generator().manual_seed(index)
        ), index % 3


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return tokens, torch.tensor([label for _, label in samples])


class FirstToken(nn.Module):
    """Reads the first token only, before (`early`) or after its layers: the output does not depend on the length."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.early = early
        self.table, self.inner, self.last = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        hidden = torch.relu(self.inner(hidden[:, 0] if self.early else hidden))
        return self.last(hidden if self.early else hidden[:, 0])


def train(*lengths: int, early: bool = False, ends: tuple[int, ...] = (0, 2)) -> dict[str, Tensor]:
    """Return the weights after an epoch, with stages that end with these layers; one stage is one device."""

    def model() -> nn.Module:
        return built(lambda: FirstToken(early=early), seed=5)

    problem = pipeline_problem(
        model(), torch.ones(1, PLANNED, dtype=torch.long), CLUSTER, batch_size=8
    )
    assert problem.model.sample_shape == (PLANNED,)
    plan = straight_plan(ends, ((4,),) * len(ends), 2)
    strategy = HybridPipeline(
        problem=problem,
        plan=plan,
        schedule=TrainingSchedule(
            num_samples=NUM_SAMPLES, batch_size=8, num_epochs=1, interval_epochs=1.0
        ),
    )
    client = make_client_app(
        lambda context: model(),
        lambda *_: DataLoader(Words(*lengths), collate_fn=padded),
        FP32Trainer(optimizer=sgd(0.1), device="cpu"),
    )
    with LocalGrid(client, CLUSTER.num_socs, num_workers=0) as grid:
        result = strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=1)
    return dict(result.arrays.to_torch_state_dict())


@pytest.mark.parametrize("lengths", [(3, 9), (PLANNED, 9), (11,)])
def test_activations_of_another_shape_are_one_line_with_both_shapes(
    lengths: tuple[int, ...],
) -> None:
    with pytest.raises(TrainingFailed) as caught:
        train(*lengths)
    shapes = (f"({max(lengths)},)", f"({max(lengths)}, 8)", f"({PLANNED},)", f"({PLANNED}, 8)")
    for named in (*shapes, "layer 0 of FirstToken"):
        assert named in str(caught.value)
    assert "AssertionError" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("lengths", [(3, 9), (PLANNED, 9), (11,)])
def test_lengths_that_no_cut_sees_train_as_on_one_device(lengths: tuple[int, ...]) -> None:
    untrained = built(lambda: FirstToken(early=True), seed=5)
    for early in (False, True):
        alone = train(*lengths, early=early, ends=(2,))
        assert not torch.equal(alone["last.weight"], untrained.last.weight)
    for name, weight in train(*lengths, early=True, ends=(1, 2)).items():
        torch.testing.assert_close(weight, alone[name], msg=name)


def test_samples_with_other_dimensions_are_one_line_before_the_model_is_read() -> None:
    class Pairs(Words):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.ones(2, 3, dtype=torch.long), 0

    problem = pipeline_problem(
        FirstToken(early=True), torch.ones(1, PLANNED, dtype=torch.long), CLUSTER, batch_size=8
    )
    strategy = HybridPipeline(
        problem=problem,
        schedule=TrainingSchedule(
            num_samples=NUM_SAMPLES, batch_size=8, num_epochs=1, interval_epochs=1.0
        ),
    )
    client = make_client_app(
        lambda context: FirstToken(early=True),
        lambda *_: Pairs(),
        FP32Trainer(optimizer=sgd(0.1), device="cpu"),
    )
    with (
        LocalGrid(client, CLUSTER.num_socs, num_workers=0) as grid,
        pytest.raises(
            TrainingFailed,
            match=r"samples have shape \(2, 3\), and \(7,\) was planned",
        ),
    ):
        strategy.start(grid, ArrayRecord(FirstToken(early=True).state_dict()), num_rounds=1)


@pytest.mark.parametrize("reduction", ["always", "ring"])
def test_a_reduction_of_groups_is_refused_by_name(reduction: str) -> None:
    problem = pipeline_problem(
        FirstToken(early=True), torch.ones(1, PLANNED, dtype=torch.long), CLUSTER, batch_size=8
    )
    strategy = HybridPipeline(
        problem=problem,
        schedule=TrainingSchedule(
            num_samples=NUM_SAMPLES, batch_size=8, num_epochs=1, interval_epochs=1.0
        ),
    )
    client = make_client_app(
        lambda context: FirstToken(early=True),
        lambda *_: DataLoader(Words(PLANNED), collate_fn=padded),
        FP32Trainer(optimizer=sgd(0.1), device="cpu", reduction=reduction),
    )
    with (
        LocalGrid(client, CLUSTER.num_socs, num_workers=0) as grid,
        pytest.raises(
            TrainingFailed, match=f"FP32Trainer: reduction = '{reduction}' is for groups"
        ),
    ):
        strategy.start(grid, ArrayRecord(FirstToken(early=True).state_dict()), num_rounds=1)
