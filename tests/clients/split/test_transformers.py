"""Models of `transformers` in two halves, on Hugging Face's data, with LoRA of `peft`, as an app's author has them."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from socflower.cluster import device
from socflower.edgecloud.cloud.operator_calls import fetch_weights
from socflower.edgecloud.plan.device_costs import split_costs
from socflower.edgecloud.samples import BatchOrder
from socflower.edgecloud.split_program import HalvesProgram, cut_shapes
from socflower.model_graph.layer_profile import profile_module
from socflower.training.model_state import trainable_state
from socflower.wire.message_keys import FROZEN_SHA256
from socflower.workloads.map_dataset import as_data_source
from tests.clients.split.clouds import Cloud, strategy_of
from tests.clients.split.models import BATCHES_PER_EPOCH, SEED, differing
from tests.clients.split.test_any_data import NUM_BATCHES, app_of
from tests.clients.split.test_frozen_halves import CountingGrid
from tests.one_line import refused
from tests.seeded import built

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_run_and_thread")]
NUM_TOKENS, WIDTH = 60, 32
transformers: Any = None
datasets: Any = None
peft: Any = None


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    """Imported where these tests run: the quick tests collect this module too, in every process."""
    globals().update(
        {name: pytest.importorskip(name) for name in ("transformers", "datasets", "peft")}
    )


class BertFront(nn.Module):
    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.embeddings, self.layer = bert.embeddings, bert.encoder.layer[0]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embeddings(input_ids), attention_mask[:, None, None].bool())


class BertBack(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer, self.classifier = model.bert.encoder.layer[1], model.classifier

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.layer(hidden, attention_mask[:, None, None].bool()))


class BertHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        model = transformers.BertForTokenClassification(
            transformers.BertConfig(
                vocab_size=NUM_TOKENS,
                hidden_size=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_labels=4,
                intermediate_size=64,
                max_position_embeddings=16,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        self.front, self.back = BertFront(model.bert), BertBack(model)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(input_ids, attention_mask), attention_mask)


class GptFront(nn.Module):
    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.block = gpt.wte, gpt.wpe, gpt.h[0]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1])))


class GptHalves(nn.Module):
    """A causal language model; `adapters` are the halves that get LoRA on a frozen base."""

    def __init__(self, adapters: tuple[str, ...] = (), *, tied: bool = False) -> None:
        super().__init__()
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=NUM_TOKENS,
                n_positions=16,
                n_embd=128,
                n_layer=2,
                n_head=2,
                tie_word_embeddings=tied,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self.front = GptFront(model.transformer)
        self.back = nn.Sequential(model.transformer.h[1], model.transformer.ln_f, model.lm_head)
        if adapters:
            targets = [
                name
                for name, _ in self.named_modules()
                if name.startswith(adapters) and "c_attn" in name
            ]
            self.requires_grad_(False)
            peft.inject_adapter_in_model(
                peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=True), self
            )


def next_token_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100)


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: pad_sequence(
            [torch.as_tensor(row[key]) for row in rows],
            batch_first=True,
            padding_value=padding[key],
        )
        for key in rows[0]
        if key in padding
    }


def sentences(seed: int, *, masks: bool = True) -> DataLoader[Any]:
    """Return sequences of 3 to 12 tokens, which a collate function pads to the longest of the batch."""
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(1, NUM_TOKENS, draw.integers(3, 13)).tolist() for _ in range(24)]
    columns = {"input_ids": tokens, "labels": [[token % 4 for token in row] for row in tokens]}
    if masks:
        columns["attention_mask"] = [[1] * len(row) for row in tokens]
    return DataLoader(datasets.Dataset.from_dict(columns).with_format("torch"), collate_fn=padded)


def program_of(model: Any, seed: int, *, masks: bool = True, **settings: Any) -> HalvesProgram:
    data = sentences(0, masks=masks)
    return HalvesProgram(
        model_fn=lambda: built(model, seed),
        example=padded([data.dataset[0], data.dataset[1]]),
        seed=seed,
        loss=next_token_loss,
        shared=["attention_mask"] if masks else [],
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.01),
        **settings,
    )


def undivided(program: HalvesProgram, data: DataLoader[Any]) -> dict[str, NDArray[Any]]:
    model = program.model().train()
    updates = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=0.01
    )
    source, order = as_data_source(data), BatchOrder(24, BATCHES_PER_EPOCH, SEED)
    for number in range(NUM_BATCHES):
        batch = source.batch(order.rows(number))
        labels = batch.pop("labels")
        outputs = model(**batch) if "attention_mask" in batch else model.back(model.front(**batch))  # type: ignore[operator]
        updates.zero_grad()
        next_token_loss(outputs, labels).backward()
        updates.step()
    return {name: tensor.numpy() for name, tensor in trainable_state(model).items()}


def trained(
    program: HalvesProgram, data: Any, cloud: Cloud
) -> tuple[dict[str, NDArray[Any]], Any, CountingGrid]:
    strategy, grid = (
        strategy_of(program, 1, cloud.client(name="mine")),
        CountingGrid([app_of(program, data)]),
    )
    config = ConfigRecord({FROZEN_SHA256: program.frozen_sha256} if program.frozen_sha256 else {})
    result = strategy.start(
        grid,
        ArrayRecord(program.trainable_state()),  # type: ignore[arg-type]
        num_rounds=strategy.num_rounds,
        timeout=60,
        train_config=config,
    )
    return {name: array.numpy() for name, array in result.arrays.items()}, strategy, grid


@pytest.mark.parametrize("seed", range(3))
def test_bert_on_padded_batches_is_trained_as_in_one_piece(seed: int) -> None:
    program, data = program_of(BertHalves, seed), sentences(seed)
    with Cloud(program) as cloud:
        assert differing(trained(program, data, cloud)[0], undivided(program, data)) == []


@pytest.mark.parametrize("seed", range(3))
def test_lora_sends_adapters_only_and_a_frozen_front_half_gets_no_gradient(seed: int) -> None:
    data, received = sentences(seed, masks=False), {}
    full_bytes = sum(tensor.nbytes for tensor in built(GptHalves, seed).state_dict().values())
    for adapters in (("front", "back"), ("back",)):
        program = program_of(lambda adapters=adapters: GptHalves(adapters), seed, masks=False)
        with Cloud(program) as cloud:
            found, strategy, grid = trained(program, data, cloud)
            held = fetch_weights(cloud.operator, "mine-0")[1]
        assert differing(found, undivided(program, data)) == []
        own_bytes = sum(array.nbytes for name, array in found.items() if name.startswith("front."))
        assert grid.num_bytes == 4 * own_bytes  # two rounds, to the edge and back
        assert {f"back.{name}" for name in held} == {
            name for name in found if name.startswith("back.")
        }
        assert sum(array.nbytes for array in found.values()) < 0.02 * full_bytes
        received[adapters] = sum(report.measured[0].down_bytes for report in strategy.reports)
    assert received[("back",)] < 0.05 * received[("front", "back")]


def test_embeddings_that_the_head_shares_are_refused() -> None:
    refused(
        lambda: program_of(lambda: GptHalves(tied=True), 0, masks=False).fingerprint(),
        "both halves",
    )


def test_halves_are_priced_from_the_profile_of_the_whole_model() -> None:
    program = program_of(BertHalves, 0)
    batch = copy.copy(program.example)
    batch.pop("labels")
    profile = profile_module(program.model(), batch, "bert")
    shapes = cut_shapes(program.split, profile)
    costs = split_costs(profile, shapes, device("raspberry-pi-4b"), device("gpu-v100"), 8)
    front = program.model().get_submodule("front")
    assert shapes[0].front_state_bytes == sum(
        tensor.nbytes for tensor in front.state_dict().values()
    )
    assert 0.0 < costs.cuts[0].edge_forward_s < costs.edge_only_s
