"""Frozen parameters stay in place: what travels of a split training, and that all sides have the same base."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import LayeredProgram
from socflower.errors import TrainingFailed
from socflower.strategies.split_replay import SplitReplay
from socflower.wire.message_keys import FROZEN_SHA256
from socflower.workloads.map_dataset import as_data_source
from tests.clients.split.clouds import Cloud, strategy_of
from tests.clients.split.models import BATCHES_PER_EPOCH, SEED, ThreadGrid, differing
from tests.clients.split.test_any_data import NUM_BATCHES, Augmented, app_of, convolutions
from tests.one_line import refused

pytestmark = pytest.mark.usefixtures("one_run_and_thread")


def frozen_program(seed: int) -> LayeredProgram:
    return replace(convolutions(seed), frozen="2")


def start(
    strategy: SplitReplay,
    program: LayeredProgram,
    grid: ThreadGrid,
    *,
    whole: bool = False,
    digest: bool = True,
) -> dict[str, NDArray[Any]]:
    arrays = program.model().state_dict() if whole else program.trainable_state()
    config = ConfigRecord({FROZEN_SHA256: program.frozen_sha256} if digest else {})
    result = strategy.start(
        grid,
        ArrayRecord(arrays),
        num_rounds=strategy.num_rounds,  # type: ignore[arg-type]
        timeout=60,
        train_config=config,
    )
    return {name: array.numpy() for name, array in result.arrays.items()}


def undivided(program: LayeredProgram, data: Augmented) -> dict[str, NDArray[Any]]:
    model = program.model().train()
    model[:3].eval().requires_grad_(False)
    updates = torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9
    )
    batches = PartyBatches(as_data_source(data), BatchOrder(len(data), BATCHES_PER_EPOCH, SEED))
    for batch in range(NUM_BATCHES):
        inputs, labels, _ = batches(batch)
        updates.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), torch.from_numpy(labels)).backward()
        updates.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


class CountingGrid(ThreadGrid):
    """Counts the bytes of tensors that edges get and answer."""

    num_bytes = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        asked = list(messages)
        self._count(asked)
        replies = super().send_and_receive(asked, timeout=timeout)
        self._count(replies)
        return replies

    def _count(self, messages: list[Message]) -> None:
        self.num_bytes += sum(
            array.numpy().nbytes
            for message in messages
            if message.has_content()
            for record in message.content.array_records.values()
            for array in record.values()
        )


@pytest.mark.parametrize(
    ("seed", "cut"),
    [
        (0, 1),
        (2, 2),
        *(pytest.param(seed, cut, marks=pytest.mark.slow) for seed, cut in ((1, 1), (2, 0))),
    ],
)
def test_only_what_trains_travels_and_a_frozen_front_half_gets_nothing_back(
    seed: int, cut: int
) -> None:
    """Cut 1 is where the frozen layers end; without parameters to train before it, no gradient comes back."""
    program, data = frozen_program(seed), Augmented(seed)
    expected = undivided(program, data)
    trained = {name: expected[name] for name in program.trainable_state()}
    here = start(
        strategy_of(program, 1, None, cut=cut), program, ThreadGrid([app_of(program, data)])
    )
    assert differing(here, trained) == []
    with Cloud(program) as cloud:
        strategy, grid = (
            strategy_of(program, 1, cloud.client(), cut=cut),
            CountingGrid([app_of(program, data)]),
        )
        assert differing(start(strategy, program, grid), trained) == []
        whole_grid = CountingGrid([app_of(program, data)])
        whole = start(
            strategy_of(program, 1, cloud.client(), cut=cut),
            program,
            whole_grid,
            whole=True,
            digest=False,
        )
        assert differing(whole, expected) == []
    frozen_bytes = 4 * sum(parameter.numel() for parameter in program.model()[:2].parameters())
    # Two rounds, down and up; nothing but running statistics is left where the whole half is frozen.
    assert whole_grid.num_bytes - grid.num_bytes == 4 * frozen_bytes
    features = 6 * (4 * 4 * 4 if cut < 2 else 4 * 2 * 2) * 4 * BATCHES_PER_EPOCH
    for report in strategy.reports:
        assert report.measured[0].up_bytes > features
        assert (report.measured[0].down_bytes > features) == (cut == 2)


@pytest.mark.parametrize("stranger", ["edge", "cloud"])
def test_a_side_with_another_base_is_refused_before_anything_is_trained(stranger: str) -> None:
    program, other = frozen_program(0), frozen_program(1)
    with Cloud(other if stranger == "cloud" else program) as cloud:
        edge = app_of(other if stranger == "edge" else program, Augmented(0))
        client = cloud.client()
        with pytest.raises(
            Exception, match="the frozen parameters of this node are not the server's: their digest"
        ) as caught:
            start(strategy_of(program, 1, client, cut=1), program, ThreadGrid([edge]))
        assert "\n" not in str(caught.value)


def test_without_a_digest_nobody_could_know_that_bases_are_the_same() -> None:
    program = frozen_program(0)
    refused(
        lambda: start(
            strategy_of(program, 1, None, cut=1),
            program,
            ThreadGrid([app_of(program, Augmented(0))]),
            digest=False,
        ),
        "frozen_digest",
        error=TrainingFailed,
    )
