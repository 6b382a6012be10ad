"""Split training of data in the forms that users have, against the same training of the whole model in plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset

from socflower.clients.split.app import make_split_client_app
from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import LayeredProgram, SplitProgram
from socflower.errors import ConfigError
from socflower.training.fp32 import sgd
from socflower.training.trainer import torch_threads
from socflower.workloads.map_dataset import as_data_source
from tests.clients.split.clouds import PATIENCE, Cloud, start, strategy_of
from tests.clients.split.models import BATCHES_PER_EPOCH, SEED, ThreadGrid, differing
from tests.seeded import built

pytestmark = pytest.mark.usefixtures("one_run_and_thread")

NUM_BATCHES = 2 * BATCHES_PER_EPOCH


class Augmented(Dataset):  # type: ignore[type-arg]
    """Images that are flipped and made noisy at random, each time they are read."""

    def __init__(self, seed: int) -> None:
        self._images = torch.from_numpy(
            np.random.default_rng(seed).normal(size=(24, 2, 6, 6)).astype(np.float32)
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image) + float(
            np.random.normal()
        ), index % 3


def convolutions(seed: int) -> LayeredProgram:
    def model() -> nn.Module:
        return built(
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, 4, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16, 3),
            ),
            seed,
        )

    return LayeredProgram(model_fn=model, example=(2, 6, 6), optimizer=sgd(0.05), seed=seed)


def app_of(program: SplitProgram, data: Any) -> ClientApp:
    return make_split_client_app(
        lambda context: program,
        lambda context, party, num_parties: data,
        link_fn=lambda context: PATIENCE,
    )


def in_one_process(
    program: SplitProgram, data: Any, **party_settings: Any
) -> dict[str, NDArray[Any]]:
    return start(
        strategy_of(program, 1, None, **party_settings),
        program,
        ThreadGrid([app_of(program, data)]),
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_an_augmented_dataset_gives_the_weights_of_training_in_one_piece(seed: int) -> None:
    program, data = convolutions(seed), Augmented(seed)
    with torch_threads(1):
        model = program.model().train()
        updates = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        source, order = as_data_source(data), BatchOrder(len(data), BATCHES_PER_EPOCH, SEED)
        for batch in range(NUM_BATCHES):
            inputs, labels = source.batch(order.rows(batch), (SEED, batch // BATCHES_PER_EPOCH, 0))
            updates.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            updates.step()
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert differing(in_one_process(program, data), expected) == []
    loaded = DataLoader(data, num_workers=2 * (seed > 0))
    with Cloud(program) as cloud:
        strategy = strategy_of(program, 1, cloud.client())
        assert (
            differing(start(strategy, program, ThreadGrid([app_of(program, loaded)])), expected)
            == []
        )


def test_samples_of_another_shape_than_the_example_are_refused() -> None:
    images = [(torch.zeros(2, 8, 8), 0)] * 2
    with pytest.raises(ConfigError, match=r"\(2, 8, 8\), and example = \(2, 6, 6\)"):
        convolutions(0).divide(as_data_source(images).batch(np.arange(2), (0, 0, 0)))


def test_a_replay_reads_the_batch_as_its_first_pass_did() -> None:
    """With K > 0 batches are read twice; the weights are those of batches that were written down once."""
    program, data = convolutions(0), Augmented(0)
    batches = PartyBatches(as_data_source(data), BatchOrder(len(data), BATCHES_PER_EPOCH, SEED))
    written = [batches(batch) for batch in range(NUM_BATCHES)]

    class Written(type(as_data_source(data))):  # type: ignore[misc]
        def batch(self, indices: Any, key: Any = ()) -> Any:
            inputs, labels, _ = next(
                each
                for number, each in enumerate(written)
                if number // BATCHES_PER_EPOCH == key[1] and list(each[2]) == list(indices)
            )
            return inputs, torch.from_numpy(labels)

    stale = in_one_process(program, data, window=3)
    assert differing(stale, in_one_process(program, Written(data), window=3)) == []
    assert differing(stale, in_one_process(program, data)) != []
