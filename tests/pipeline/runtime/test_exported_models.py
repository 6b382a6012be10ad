"""BERT and GPT-2 of `transformers` over a pipeline: the weights of one device."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from socflower.model_graph.exported_module import exported_module
from socflower.pipeline.profiler.layers import read_model
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.workloads.map_dataset import as_data_source
from tests.pipeline.problems import straight_plan
from tests.pipeline.runtime.training import minis, train_together
from tests.seeded import built

models = pytest.importorskip("tests.model_graph.test_exported_module")
NUM_SENTENCES, LENGTH = 64, 8


def cross_entropy_of_words(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits (n, length, words)."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", ["bert", "gpt-2"])
def test_training_over_three_devices_equals_one(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 50, (NUM_SENTENCES, LENGTH), generator=generator)
    tokens[::3, 6:] = 0
    labels: Tensor = tokens[:, 0] % 2
    loss: Any = functional.cross_entropy
    make: Any = models.Classifier
    if kind == "gpt-2":
        labels, loss, make = tokens.roll(-1, 1), cross_entropy_of_words, models.undropped
    module = exported_module(built(make, 3), tokens[:4])
    trainer = FP32Trainer(loss=loss, optimizer=sgd(0.05), device="cpu")
    reading = read_model(module, tokens[:1], kind)
    last = reading.model.num_layers - 1
    assert last >= 4
    ends = (last // 3, 2 * last // 3, last)
    found = [
        train_together(
            module,
            plan,
            minis(3, 8),
            trainer,
            reading,
            data=as_data_source(TensorDataset(tokens, labels)),
        ).weights
        for plan in (
            straight_plan((last,), ((4,),), 2),
            straight_plan(ends, ((4,), (4,), (4,)), 2),
        )
    ]
    before = dict(module.state_dict())
    assert found[0].keys() == found[1].keys()
    assert any(not np.array_equal(found[0][name], before[name]) for name in found[0])
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0.0, atol=1e-5, msg=name)
