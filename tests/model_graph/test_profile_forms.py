"""Profiles of models whose forward takes token ids, several arguments or dicts, against hand formulas and torch."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from socflower.cluster.cost_model import ModelProfile
from socflower.model_graph.batch_form import mapped, output_of
from socflower.model_graph.layer_profile import profile_module
from socflower.model_graph.random_state import forked_generator
from socflower.workloads.models.built_in import built_in_profile, model_names
from tests.one_line import refused

TOKENS, WIDTH, HEADS, HIDDEN, VOCABULARY = 12, 16, 2, 24, 50


def tokens(num_samples: int = 3) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (num_samples, TOKENS), generator=torch.Generator().manual_seed(0)
    )


def counted_by_torch(model: nn.Module, batch: Any) -> tuple[float, float]:
    """Return FLOPs of forward pass and training, counted while torch runs them both on the meta device."""
    model = copy.deepcopy(model).eval().to("meta")
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        result = output_of(model, mapped(batch, lambda tensor: tensor.to("meta")))
        forward = counter.get_total_flops()
        loss = result["loss"] if isinstance(result, Mapping) else result.sum()
        loss.backward()
    return float(forward), float(counter.get_total_flops())


# ------------------------------------------------------------------------------------------ models by hand


class Attention(nn.Module):
    """Self-attention as timm writes it."""

    def __init__(self, *, is_fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj, self.is_fused = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            is_fused,
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count, length, _ = inputs.shape
        query, key, value = (
            self.qkv(inputs).reshape(count, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        if self.is_fused:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * query.shape[-1] ** -0.5
            mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)
        output: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs + self.attn(self.norm1(inputs))
        output: torch.Tensor = inputs + self.mlp(self.norm2(inputs))
        return output


class Tagger(nn.Module):
    """A BiLSTM over token ids; with labels it returns the loss, too, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 3)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        # What forward itself makes is on the device of the pass.
        positions = torch.arange(ids.shape[1])[None, :, None]
        logits = self.head(self.lstm(self.embedding(ids) + positions)[0])
        if labels is None:
            return {"logits": logits}
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


def block_flops(length: int) -> int:
    """Return the FLOPs of a transformer's block: four projections, two products of scores, two layers."""
    return 2 * length * (4 * WIDTH**2 + 2 * length * WIDTH + 2 * WIDTH * HIDDEN)


def test_attention_keeps_its_output_and_without_the_fused_kernel_its_scores() -> None:
    fused, plain = (
        profile_module(Attention(is_fused=is_fused), torch.zeros(2, 9, WIDTH), "attention").layers
        for is_fused in (True, False)
    )
    assert [layer.kind for layer in fused] == ["Attention", "Linear", "Linear"]
    # And a value for each head and query.
    assert fused[0].output_bytes == 4 * (9 * WIDTH + HEADS * 9)
    assert plain[0].output_bytes >= 4 * (9 * WIDTH + 2 * HEADS * 9 * 9)
    assert fused[0].forward_flops == plain[0].forward_flops == 2 * 2 * 9 * 9 * WIDTH


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    kv_length=st.integers(1, 6),
    length=st.integers(1, 6),
    width=st.integers(1, 5),
    value_width=st.integers(1, 5),
    is_causal=st.booleans(),
)
def test_attention_of_any_shape_costs_its_scores_and_sums(
    batch: int,
    heads: int,
    kv_length: int,
    length: int,
    width: int,
    value_width: int,
    is_causal: bool,
) -> None:
    class Attend(nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    shapes = (length, width), (kv_length, width), (kv_length, value_width)
    parts = tuple(torch.zeros(batch, heads, *shape) for shape in shapes)
    (layer,) = profile_module(Attend(), parts, "attend").layers
    assert layer.forward_flops == 2 * heads * length * kv_length * (width + value_width)
    assert layer.output_bytes == 4 * heads * length * (value_width + 1)


def test_a_bilstm_costs_four_gates_a_direction_and_embeddings_cost_nothing() -> None:
    model, batch = Tagger(), {"ids": tokens(), "labels": tokens() % 3}
    profile = profile_module(model, batch, "tagger")
    flops = {layer.name: layer.forward_flops for layer in profile.layers}
    assert flops == {
        "embedding": 0,
        "lstm": TOKENS * 2 * 2 * 4 * HIDDEN * (WIDTH + HIDDEN),
        "head": TOKENS * 2 * 2 * HIDDEN * 3,
    }
    forward, training = counted_by_torch(model, batch)
    assert profile.forward_flops == forward / 3
    # A direction; they need no gradient, but the first layer's count.
    first_states = 2 * 2 * 4 * HIDDEN * HIDDEN
    assert profile.training_flops == training / 3 + first_states == 3 * profile.forward_flops
    # Ids and labels of 8 bytes.
    assert profile.input_bytes == 2 * 8 * TOKENS


class Attend(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = (
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            need_weights,
        )

    def forward(self, query: torch.Tensor, memory: torch.Tensor) -> Any:
        return self.attention(query, memory, memory, need_weights=self.need_weights)[0]


def test_multi_head_attention_keeps_its_scores_only_if_they_are_asked_for() -> None:
    batch = [torch.zeros(2, 5, WIDTH), torch.zeros(2, 7, WIDTH)]
    fused, plain = (
        profile_module(Attend(need_weights), batch, "mha").layers for need_weights in (False, True)
    )
    assert (
        fused[0].forward_flops
        == plain[0].forward_flops
        == 2 * WIDTH**2 * (2 * 5 + 2 * 7) + 2 * 2 * 5 * 7 * WIDTH
    )
    num_scores = HEADS * 5 * 7
    # With them: scores, their softmax, the mean over the heads, scaled queries; without: a value for each query.
    assert plain[0].output_bytes - fused[0].output_bytes == 4 * (
        2.5 * num_scores + 5 * WIDTH - HEADS * 5
    )
    assert fused[0].output_bytes >= 4 * (3 * 5 + 2 * 7) * WIDTH
    # The projection's module is never called.
    assert (fused[1].forward_flops, fused[1].num_tensors) == (
        0,
        2,
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_a_transformer_encoder_costs_its_blocks(frozen: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)
    # Frozen, torch may take a fused path.
    model = nn.TransformerEncoder(layer, 2).eval().requires_grad_(not frozen)
    profile = profile_module(model, (7, WIDTH), "encoder")
    assert profile.forward_flops == 2 * block_flops(7)
    assert profile.training_flops == (1 if frozen else 3) * profile.forward_flops


# ------------------------------------------------------------------------------------------ transformers


def small(family: str, attention: str = "sdpa") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    text = {"vocab_size": VOCABULARY, "attn_implementation": attention}
    if family == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_inner": HIDDEN}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        gpt2 = transformers.GPT2Config(**text, **sizes, **ends, n_positions=TOKENS)
        batch = {"input_ids": tokens(), "labels": tokens()}
        return transformers.GPT2LMHeadModel(gpt2), batch
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
    }
    if family == "bert":
        bert = transformers.BertForSequenceClassification(
            transformers.BertConfig(**text, **sizes, max_position_embeddings=TOKENS)
        )
        return bert, {"input_ids": tokens(), "labels": torch.tensor([0, 1, 0])}
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **sizes, image_size=12, patch_size=4, num_labels=5, attn_implementation=attention
        )
    )
    return vit, {"pixel_values": torch.zeros(3, 3, 12, 12), "labels": torch.tensor([0, 1, 2])}


LENGTHS = {"gpt2": TOKENS, "bert": TOKENS, "vit": 10}
OUTSIDE_BLOCKS = {
    "gpt2": 2 * TOKENS * WIDTH * VOCABULARY,
    "bert": 2 * WIDTH * (WIDTH + 2),
    "vit": 2 * 9 * WIDTH * 48 + 2 * WIDTH * 5,
}


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_transformers_cost_their_blocks_and_heads_and_keep_scores_only_of_eager_attention(
    family: str,
) -> None:
    activation_bytes = {}
    for attention in ("sdpa", "eager"):
        model, batch = small(family, attention)
        profile = profile_module(model, batch, family)
        assert profile.ran_on == "meta"
        assert profile.forward_flops == pytest.approx(
            2 * block_flops(LENGTHS[family]) + OUTSIDE_BLOCKS[family]
        )
        forward, training = counted_by_torch(model, batch)
        assert profile.forward_flops == pytest.approx(forward / 3)
        patches = 2 * 9 * WIDTH * 48 if family == "vit" else 0
        assert (
            profile.training_flops
            == pytest.approx(training / 3 + patches)
            == 3 * profile.forward_flops
        )
        # A tied weight counts once.
        assert profile.num_tensors == len(list(model.parameters()))
        assert profile.weight_bytes == 4 * sum(weight.numel() for weight in model.parameters())
        assert all(layer.output_bytes > 0 for layer in profile.layers if layer.forward_flops)
        activation_bytes[attention] = profile.activation_bytes
    # Of two blocks, scores and their softmax; the fused kernel makes a value for each query instead.
    length = LENGTHS[family]
    assert activation_bytes["eager"] - activation_bytes["sdpa"] >= 2 * 4 * HEADS * (
        2 * length**2 - length
    )


@pytest.mark.parametrize("family", ["gpt2", "bert", "vit"])
def test_activations_are_at_least_those_that_autograd_keeps(family: str) -> None:
    """Kept tensors are some of those that layers make: in small transformers a half to all of them."""
    model, batch = small(family)
    constants = [*model.parameters(), *model.buffers()]
    weights = {tensor.untyped_storage().data_ptr() for tensor in constants}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, forked_generator(0):
        result = model.eval()(**batch)
    activation_bytes = 3 * profile_module(model, batch, family).activation_bytes
    assert sum(kept.values()) <= activation_bytes <= 2.2 * sum(kept.values())
    # Until here the graph holds what it keeps, and no memory is used twice.
    del result


def test_bytes_are_those_of_each_tensors_type() -> None:
    model = nn.Sequential(Attention(), nn.Linear(WIDTH, 3))
    single, half = (
        profile_module(model.to(dtype), torch.zeros(2, 9, WIDTH, dtype=dtype), "model")
        for dtype in (torch.float32, torch.bfloat16)
    )
    # In float32.
    log_sums = 4 * HEADS * 9
    assert single.activation_bytes - log_sums == 2 * (half.activation_bytes - log_sums)
    assert (
        single.weight_bytes == 2 * half.weight_bytes and single.forward_flops == half.forward_flops
    )


@given(groups=st.integers(1, 4), trained=st.booleans())
def test_grouped_convolutions_multiply_as_much_for_each_gradient(
    groups: int, trained: bool
) -> None:
    """By hand: torch's counter takes the weights' gradient for that of an ungrouped convolution."""
    first, second = nn.Conv1d(4, 12, 3, padding=1), nn.Conv1d(12, 24, 3, padding=1, groups=groups)
    second.requires_grad_(trained)
    layer = profile_module(nn.Sequential(first, second), (4, 10), "grouped").layers[1]
    assert layer.forward_flops == 2 * 10 * 24 * 12 // groups * 3
    assert layer.training_flops == (3 if trained else 2) * layer.forward_flops


# --------------------------------------------------------------------------------------- frozen parameters


def mlp(*trained: bool) -> nn.Sequential:
    layers = [nn.Linear(10 * (place + 1), 10 * (place + 2)) for place in range(len(trained))]
    for layer, is_trained in zip(layers, trained, strict=True):
        layer.requires_grad_(is_trained)
    return nn.Sequential(*layers)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=5).filter(any))
def test_a_backward_pass_multiplies_for_the_gradients_that_are_needed(trained: list[bool]) -> None:
    model = mlp(*trained)
    profile = profile_module(model, (10,), "mlp")
    first = trained.index(True)
    # The gradient of the weights of trained layers, and of the inputs of those behind the first trained one; where the
    # first of all trains, of the model's inputs, too.
    ratios = [
        is_trained + (place > first or (place == first == 0))
        for place, is_trained in enumerate(trained)
    ]
    assert [layer.backward_to_forward for layer in profile.layers] == ratios
    _, training = counted_by_torch(model, torch.zeros(1, 10))
    assert profile.training_flops == training + (
        profile.layers[0].forward_flops if trained[0] else 0
    )
    assert [layer.in_backward for layer in profile.layers] == [
        place >= first for place in range(len(trained))
    ]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=5).filter(any))
def test_all_weights_take_memory_and_trained_ones_gradients_and_optimiser_state(
    trained: list[bool],
) -> None:
    model = mlp(*trained)
    profile = profile_module(model, (10,), "mlp")
    weights = [(weight.requires_grad, 4 * weight.numel()) for weight in model.parameters()]
    train_bytes = sum(size for is_trained, size in weights if is_trained)
    assert profile.weight_bytes == train_bytes and profile.num_tensors == 2 * sum(trained)
    assert (
        profile.parameter_bytes
        == sum(size for _, size in weights)
        == profile.weight_bytes + profile.frozen_bytes
    )
    without_activations = profile.training_memory_bytes(0, optimizer_copies=2)
    assert without_activations == profile.parameter_bytes + 3 * train_bytes
    outputs = [layer.output_bytes for layer in profile.layers]
    first = trained.index(True)
    assert profile.activation_bytes == 40 + sum(outputs[first:]) + max(outputs[:first], default=0.0)


def test_lora_exchanges_its_factors_and_multiplies_for_few_weight_gradients() -> None:
    import peft

    model, batch = small("gpt2")
    full = profile_module(model, batch, "gpt2")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    profile = profile_module(adapted, batch, "lora")
    factors = 2 * 2 * (WIDTH + 3 * WIDTH)
    assert (profile.weight_bytes, profile.num_tensors) == (4 * factors, 4)
    assert profile.frozen_bytes == full.weight_bytes
    assert profile.forward_flops == pytest.approx(full.forward_flops + 2 * TOKENS * factors)
    forward, training = counted_by_torch(adapted, batch)
    assert profile.forward_flops == pytest.approx(forward / 3)
    # Exactly, since the first layer is frozen.
    assert profile.training_flops == pytest.approx(training / 3)
    assert 2 * profile.forward_flops < profile.training_flops < 2.5 * profile.forward_flops
    assert profile.training_memory_bytes(3) < full.training_memory_bytes(3)


# Training FLOPs, output bytes and tensors, on which published results depend.
REGISTRY = {
    "lenet5": (3_910_320, 60_008, 10),
    "vgg-tiny": (20_364_288, 387_112, 14),
    "vgg-mini": (90_488_832, 720_936, 8),
    "vgg-small": (231_923_712, 983_080, 14),
    "vgg11": (916_617_216, 1_339_432, 18),
    "vgg16": (1_879_209_984, 2_338_856, 28),
    "vgg19": (2_502_279_168, 2_617_384, 38),
    "resnet8": (75_009_792, 1_098_280, 29),
    "resnet18": (3_332_536_320, 8_130_600, 62),
    "resnet34": (6_956_414_976, 13_865_000, 110),
    "mobilenet-v1": (278_126_592, 4_948_008, 83),
    "mobilenet-v2": (527_858_688, 19_426_344, 158),
    "mobilenet-v3": (398_754_048, 13_772_872, 174),
    "efficientnet-b1": (284_570_880, 10_362_600, 301),
    "resnet50": (7_786_979_328, 46_448_680, 161),
    "inception-v3": (1_859_739_648, 6_756_392, 284),
}


def test_profiles_of_the_registry_stay_and_train_all_weights_in_every_layer() -> None:
    assert set(REGISTRY) == set(model_names())
    for name, figures in REGISTRY.items():
        # That the shipped profile is the captured one: tests/workloads/test_built_in.py.
        profile = built_in_profile(name, 3, 32)
        outputs_bytes = profile.activation_bytes - profile.input_bytes
        assert (profile.training_flops, outputs_bytes, profile.num_tensors) == figures, name
        assert {layer.backward_to_forward for layer in profile.layers} == {2.0}, name
        assert all(layer.in_backward for layer in profile.layers) and not profile.frozen_bytes, name


# -------------------------------------------------------------------------------- passes that read values


class Padded(nn.Module):
    """Skips padding, and so reads values: no profile without them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(ids[:, : int((ids != 0).any(dim=0).sum())])


def on_cpu(model: nn.Module, batch: Any) -> ModelProfile:
    profile = profile_module(Padded(model), batch, "padded")
    assert profile.ran_on == "cpu"
    return profile


def test_a_model_that_reads_values_runs_once_on_the_cpu_with_the_example() -> None:
    model, ids = Tagger(), tokens().clamp(min=1)
    ids[:, 8:] = 0
    state = torch.get_rng_state()
    padded, short = on_cpu(model, ids), profile_module(model, ids[:, :8], "tagger")
    assert torch.equal(torch.get_rng_state(), state)
    # Of torch's fused recurrence.
    assert padded.forward_flops == short.forward_flops
    assert padded.training_flops == short.training_flops
    assert padded.weight_bytes == short.weight_bytes
    assert not any(module._forward_hooks for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_fused_attention_on_the_cpu_costs_what_its_products_cost(frozen: bool) -> None:
    embedding, blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(Block(), Block())
    model = nn.Sequential(
        embedding, blocks, nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)
    )
    embedding.requires_grad_(not frozen)
    blocks[0].attn.requires_grad_(not frozen)
    ids = tokens().clamp(min=1)
    ran, counted = on_cpu(model.eval(), ids), profile_module(model, ids, "model")
    assert (ran.forward_flops, ran.training_flops) == (
        counted.forward_flops,
        counted.training_flops,
    )
    assert counted.forward_flops == 3 * block_flops(TOKENS)
    kept = [
        [layer.output_bytes for layer in profile.layers if layer.kind == "Attention"]
        for profile in (ran, counted)
    ]
    assert kept[0] == kept[1] == 2 * [4 * TOKENS * (WIDTH + HEADS)]


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"words": tokens()}, "'words'"),
        ({"labels": tokens()}, "'ids'"),
        pytest.param(
            tokens().float(),
            "(3, 12)",
            marks=pytest.mark.skipif(
                Version(torch.__version__) < Version("2.13"),
                reason="torch 2.10 looks up ids of floating point if they have no values",
            ),
        ),
        ((tokens(), tokens(), tokens()), "4"),
        ({"ids": tokens(), "labels": tokens()[:, :5]}, "(36)"),
        ({}, "batch dimension"),
        ({"ids": torch.tensor(3)}, "a dict of ids"),
        ("text", "str"),
    ],
)
def test_a_wrong_example_is_refused_with_the_models_own_error(batch: Any, named: str) -> None:
    refused(lambda: profile_module(Tagger(), batch, "tagger"), "model tagger", named)


def test_a_model_that_reads_values_it_lacks_and_a_scripted_one_are_refused() -> None:
    refused(lambda: profile_module(Padded(Tagger()).to("meta"), tokens(), "padded"), "(3, 12)")
    scripted = torch.jit.script(nn.Linear(3, 3))
    refused(lambda: profile_module(scripted, (3,), "scripted"), "scripted", "ScriptModule")
