"""Models that their authors divide: batches in dicts, masks, token labels, frozen bases, and steps of one's own."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau

from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import HalvesProgram, LayeredProgram, SplitProgram
from socflower.errors import ConfigError, TrainingFailed
from socflower.model_graph.exported_module import exported_module
from socflower.training.fp32 import sgd
from socflower.training.schedules import cosine_annealing, torch_schedule
from socflower.wire.message_keys import FROZEN_SHA256
from socflower.workloads.map_dataset import as_data_source
from tests.clients.split.clouds import Cloud, strategy_of
from tests.clients.split.models import BATCHES_PER_EPOCH, SEED, ThreadGrid, differing
from tests.clients.split.test_any_data import NUM_BATCHES, app_of
from tests.edgecloud.runtime.split_training import move, one_batch
from tests.one_line import refused
from tests.seeded import built

pytestmark = pytest.mark.usefixtures("one_run_and_thread")
NUM_TOKENS, LENGTH, WIDTH = 11, 5, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attention(hidden, hidden, hidden, key_padding_mask=~mask, need_weights=False)
        return self.norm(hidden + torch.relu(self.linear(seen)))


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(NUM_TOKENS, WIDTH), Layer()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(input_ids), attention_mask)


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(WIDTH, 4)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(hidden, attention_mask))


class Tagger(nn.Module):
    """A class for every token: what a `transformers` model in two halves looks like."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.front, self.back = Front().requires_grad_(not frozen), Back()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(input_ids, attention_mask), attention_mask)


def token_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100)


def sentences(seed: int) -> list[dict[str, torch.Tensor]]:
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(24):
        mask = torch.arange(LENGTH) < int(draw.integers(2, LENGTH + 1))
        tokens = torch.from_numpy(draw.integers(0, NUM_TOKENS, LENGTH))
        made.append(
            {"input_ids": tokens, "attention_mask": mask, "labels": (tokens % 4).where(mask, -100)}
        )
    return made


def three_sentences() -> dict[str, torch.Tensor]:
    """The first batch, as a DataLoader stacks it."""
    return torch.utils.data.default_collate(sentences(0)[:3])


def tagger(seed: int = 0, *, frozen: bool = False, **settings: Any) -> HalvesProgram:
    example = three_sentences()
    return HalvesProgram(
        **{
            "model_fn": lambda: built(lambda: Tagger(frozen), seed),
            "example": example,
            "shared": ["attention_mask"],
            "loss": token_loss,
            "optimizer": sgd(0.05),
            "seed": seed,
            **settings,
        }
    )


def undivided(
    program: SplitProgram,
    data: Any,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Any] | None = None,
    scheduler: Callable[[Any, int], Any] | None = None,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    before_step: Callable[[nn.Module], object] = id,
) -> dict[str, NDArray[Any]]:
    """Return the weights of plain torch on the same batches."""
    model = program.model().train()
    updates = (optimizer or program.optimizer)(
        [each for each in model.parameters() if each.requires_grad]
    )
    rates = scheduler(updates, NUM_BATCHES) if scheduler else None
    source, order = as_data_source(data), BatchOrder(len(data), BATCHES_PER_EPOCH, SEED)
    for number in range(NUM_BATCHES):
        batch = source.batch(order.rows(number))
        updates.zero_grad()
        loss = (
            loss_of(model, batch)
            if loss_of
            else program.loss(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        )
        loss.backward()
        before_step(model)
        updates.step()
        if rates is not None:
            rates.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def trained(
    program: SplitProgram, data: Any, cloud: Any = None, **party_settings: Any
) -> dict[str, NDArray[Any]]:
    strategy = strategy_of(program, 1, cloud, **party_settings)
    config = ConfigRecord({FROZEN_SHA256: program.frozen_sha256} if program.frozen_sha256 else {})
    result = strategy.start(
        ThreadGrid([app_of(program, data)]),
        ArrayRecord(program.trainable_state()),  # type: ignore[arg-type]
        num_rounds=strategy.num_rounds,
        timeout=60,
        train_config=config,
    )
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize(
    ("seed", "frozen"),
    [
        (0, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((0, True), (1, False), (2, False))
        ),
    ],
)
def test_a_transformer_on_dicts_is_trained_as_in_one_piece(seed: int, frozen: bool) -> None:
    program, data = tagger(seed, frozen=frozen), sentences(seed)
    expected = {
        name: array
        for name, array in undivided(program, data).items()
        if name in program.trainable_state()
    }
    assert differing(trained(program, data), expected) == []
    with Cloud(program) as cloud:
        assert differing(trained(program, data, cloud.client()), expected) == []
    assert frozen == (not any(name.startswith("front.") for name in expected))


class Reader(nn.Module):
    """A class for every token, by torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.embedding, self.blocks = (
            nn.Embedding(NUM_TOKENS, WIDTH),
            nn.TransformerEncoder(block, 2),
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(input_ids)))


class MaskedReader(nn.Module):
    """The same with a mask, which every block takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.first, self.second, self.head = Layer(), Layer(), nn.Linear(WIDTH, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        first = self.first(self.embedding(input_ids), attention_mask)
        return self.head(self.second(first, attention_mask))


def exported(kind: type[nn.Module], **settings: Any) -> LayeredProgram:
    example = three_sentences()
    inputs = {"input_ids": example["input_ids"]}
    if "shared" in settings:
        inputs["attention_mask"] = example["attention_mask"]
    return LayeredProgram(
        **{
            "model_fn": lambda: exported_module(built(kind, 0), inputs),
            "example": inputs,
            "loss": token_loss,
            "optimizer": sgd(0.05),
            **settings,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "num_cuts"),
    [(Reader, {}, 4), (MaskedReader, {"shared": ["attention_mask"]}, 2)],
)
def test_an_exported_transformer_on_dicts_is_cut_between_its_blocks(
    kind: type[nn.Module], settings: dict[str, Any], num_cuts: int
) -> None:
    program = exported(kind, **settings)
    inputs = ["input_ids", *settings.get("shared", ())]
    data = [{key: one[key] for key in (*inputs, "labels")} for one in sentences(0)]
    assert len(program.cut_names()) == num_cuts
    assert set(program.trainable_state()) == set(dict(built(kind, 0).state_dict()))

    def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return token_loss(model(*(batch[key] for key in inputs)), batch["labels"])

    expected = undivided(program, data, loss_of=own_loss)
    assert differing(trained(program, data), expected) == []
    # All layers at the edge, which takes the mask as an input.
    assert differing(trained(program, data, cut=None), expected) == []


@pytest.mark.slow
def test_a_cut_moves_past_blocks_that_share_a_mask() -> None:
    program, data = exported(MaskedReader, shared=["attention_mask"]), sentences(0)
    order = BatchOrder(len(data), BATCHES_PER_EPOCH, SEED)
    batches = PartyBatches(as_data_source(data), order, divide=program.divide)
    front, back = program.front(0, 0, batches).half, program.back(0).half
    for batch, cut in enumerate((0, 1, 2, 0, 1, 2, 1, 0)):
        move(front, back, cut)
        one_batch(front, back, batch)
    trained_in_parts = {**front.weights(), **back.weights()}
    assert differing(trained_in_parts, undivided(program, data)) == []


@pytest.mark.slow
def test_shared_inputs_that_cannot_be_are_refused() -> None:
    for shared, named in (
        (["mask"], "input_ids, attention_mask"),
        (["input_ids", "attention_mask"], "not all"),
    ):
        refused(exported(MaskedReader, shared=shared).fingerprint, "shared", named)
    refused(lambda: exported(MaskedReader, shared=["attention_mask"], reverse=True), "reverse")


@pytest.mark.slow
def test_optimiser_scheduler_clipping_and_step_are_those_of_plain_torch() -> None:
    def own_step(layers: nn.Module, features: torch.Tensor, travelled: Any) -> torch.Tensor:
        outputs = layers(features, travelled["attention_mask"])
        return token_loss(outputs, travelled["labels"]) + 0.01 * outputs.square().mean()

    def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch["input_ids"], batch["attention_mask"])
        return token_loss(outputs, batch["labels"]) + 0.01 * outputs.square().mean()

    def clip(model: nn.Module) -> None:
        for half in (model.front, model.back):
            nn.utils.clip_grad_norm_(half.parameters(), 0.1)  # type: ignore[union-attr]

    adam, data = partial(torch.optim.AdamW, lr=0.01), sentences(0)
    program = tagger(
        loss=functional.cross_entropy,
        train_step=own_step,
        optimizer=adam,
        max_grad_norm=0.1,
        schedule=torch_schedule(cosine_annealing, NUM_BATCHES),
    )
    expected = undivided(
        program, data, scheduler=cosine_annealing, loss_of=own_loss, before_step=clip
    )
    found = trained(program, data)
    # A schedule is a factor on the rate, so a rate may differ in its last bit from torch's recursion.
    assert all(np.allclose(found[name], array, atol=1e-6) for name, array in expected.items())


@pytest.mark.slow
def test_autocast_runs_the_halves_in_bfloat16_and_features_cross_in_float32() -> None:
    def in_bfloat16(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            features = model.front(batch["input_ids"], batch["attention_mask"]).float()  # type: ignore[operator]
            return token_loss(model.back(features, batch["attention_mask"]), batch["labels"])  # type: ignore[operator]

    program, data = tagger(autocast=torch.bfloat16), sentences(0)
    found = trained(program, data)
    assert differing(found, undivided(program, data, loss_of=in_bfloat16)) == []
    assert differing(found, trained(tagger(), data)) != []


def test_labels_of_any_form_reach_the_loss_over_the_wire() -> None:
    def two_losses(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        kind, (amount, named) = labels
        return functional.cross_entropy(outputs, kind) + functional.mse_loss(
            outputs[:, 0], amount * named["weight"]
        )

    rows = [
        (
            torch.randn(6, generator=torch.Generator().manual_seed(at)),
            (at % 3, [float(at), {"weight": 0.5}]),
        )
        for at in range(24)
    ]
    program = LayeredProgram(
        model_fn=lambda: built(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), 1
        ),
        example=(6,),
        loss=two_losses,
        optimizer=sgd(0.001),
    )
    model = program.model()
    updates = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    source, order = as_data_source(rows), BatchOrder(24, BATCHES_PER_EPOCH, SEED)
    for number in range(NUM_BATCHES):
        inputs, labels = source.batch(order.rows(number))
        updates.zero_grad()
        two_losses(
            model(inputs),
            [labels[0], [labels[1][0].float(), {"weight": labels[1][1]["weight"].float()}]],
        ).backward()
        updates.step()
    with Cloud(program) as cloud:
        found = trained(program, rows, cloud.client())
    assert all(
        np.allclose(found[name], value.numpy(), atol=1e-6)
        for name, value in model.state_dict().items()
    )


class Tied(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.back.layer.linear.weight = self.front.layer.linear.weight


class LeftOver(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_fn": Tied}, "back.layer.linear.weight"),
        ({"model_fn": LeftOver}, "third.weight"),
        ({"bottom": "encoder"}, "encoder"),
        ({"shared": []}, "back"),
        ({"shared": ["mask"]}, "shared = ['mask']"),
        (
            {"loss": lambda outputs, labels: outputs},
            "the loss is a tensor of shape (3, 5, 4)",
        ),
        ({"train_step": token_loss}, "train_step"),
        ({"autocast": torch.float16}, "autocast = torch.float16"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_what_cannot_be_trained_in_halves_is_refused_before_anything_starts(
    settings: dict[str, Any], message: str
) -> None:
    refused(lambda: tagger(**settings).fingerprint(), message)


def test_a_model_on_dicts_that_is_not_divided_by_its_author_is_told_how() -> None:
    program = LayeredProgram(model_fn=Tagger, example=torch.zeros(1, LENGTH, dtype=torch.int64))
    refused(
        lambda: program.fingerprint(), "input_ids", "attention_mask", "HalvesProgram", "2 inputs"
    )


def test_optimisers_and_schedulers_that_halves_cannot_follow_are_refused_by_name() -> None:
    refused(
        lambda: trained(tagger(optimizer=torch.optim.LBFGS), sentences(0)),
        "LBFGS",
        error=TrainingFailed,
    )
    for scheduler, why in (
        (lambda optimizer, total: ReduceLROnPlateau(optimizer), "follows the loss"),
        (partial_one_cycle, "sets rates of its own|changes momentum"),
    ):
        with pytest.raises(ConfigError, match=why):
            torch_schedule(scheduler, 8)
    schedule, expected = (
        torch_schedule(lambda optimizer, total: CosineAnnealingLR(optimizer, total), 8),
        [],
    )
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    cosine = CosineAnnealingLR(probe, 8)
    for _ in range(8):
        expected.append(probe.param_groups[0]["lr"] / 0.3)
        probe.step()
        cosine.step()
    assert [schedule(batch) for batch in range(8)] == pytest.approx(expected)


def partial_one_cycle(optimizer: Any, total: int) -> Any:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=total + 1)


def test_labels_that_are_no_tensors_are_refused() -> None:
    batches = PartyBatches(as_data_source([(torch.zeros(2), "cat")] * 4), BatchOrder(4, 2, 1))
    refused(lambda: batches(0), "str", "labels")


def test_layers_that_the_author_evaluates_stay_so_and_the_model_is_made_once() -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        tagger = built(
            lambda: nn.Sequential(
                nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval()),
                nn.Sequential(nn.Dropout(), nn.Linear(6, 3)),
            ),
            1,
        )
        made.append(tagger)
        return tagger

    program = HalvesProgram(
        model_fn=model, bottom="0", top="1", example=(torch.ones(2, 4), torch.tensor([0, 1]))
    )
    rows = [(torch.full((4,), float(at)), at % 3) for at in range(24)]
    found = trained(program, rows)
    assert found["0.1.num_batches_tracked"] == 0 and not found["0.1.running_mean"].any()
    assert len(made) == 1 and not np.array_equal(
        found["0.0.weight"], made[0].get_parameter("0.0.weight").detach()
    )


def test_a_dict_with_one_input_trains_a_model_that_is_cut_by_its_graph() -> None:
    program = LayeredProgram(
        model_fn=lambda: built(
            lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), 1
        ),
        example=(4,),
        optimizer=sgd(0.05),
    )
    rows = [(torch.full((4,), at / 24), at % 3) for at in range(24)]
    dicts = [{"input": inputs, "labels": label} for inputs, label in rows]
    assert differing(trained(program, dicts), trained(program, rows)) == []
    batches = PartyBatches(
        as_data_source([{**row, "other": 1} for row in dicts]), BatchOrder(24, 4, 1)
    )
    refused(lambda: program.front(0, 0, batches).half.forward(0), "other")
