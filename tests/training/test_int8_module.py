"""`int8_`: a torch module that computes in int8, and everything else about it stays as torch has it."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from socflower import FP32Trainer, TrainingSpan, int8_, sgd
from socflower.precision.int8.parameters import export_parameters
from tests.one_line import refused
from tests.precision import networks
from tests.precision.networks import REACH

IMAGE = (3, 8, 8)


class Scale(nn.Module):
    """An operator that int8 does not have, with a parameter."""

    def __init__(self, width):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, inputs):
        return functional.prelu(inputs, self.factor)


def network(seed=0, *, island=False):
    torch.manual_seed(seed)
    middle = [Scale(16)] if island else []
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 16),
        *middle,
        nn.ReLU(),
        nn.Linear(16, 4),
    )


def batches(count, size=16, seed=1):
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, *IMAGE, generator=random), torch.randint(4, (size,), generator=random))
        for _ in range(count)
    ]


def train(module, optimizer, data, *, loss=functional.cross_entropy, schedule=None):
    """Do an ordinary training loop; return the losses."""
    module.train()
    losses = []
    for inputs, labels in data:
        optimizer.zero_grad()
        value = loss(module(inputs), labels)
        value.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(value.item())
    return losses


def same(one, other):
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_module_stays_what_it_is():
    module = network()
    before = copy.deepcopy(module.state_dict())
    parameters = list(module.parameters())
    assert int8_(module) is module
    assert type(module) is nn.Sequential
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert module.state_dict().keys() == before.keys()


def test_the_gradient_is_that_of_the_rounded_network():
    """Backward of any loss: the direction of autograd's gradient at the weights that int8 stands for."""
    plain, module = network(), int8_(network())
    inputs, labels = batches(1, size=64)[0]
    for each in (plain, module):
        functional.cross_entropy(each(inputs), labels).backward()
    for (name, expected), got in zip(plain.named_parameters(), module.parameters(), strict=True):
        if name == "0.bias":
            # BatchNorm cancels it: its gradient is rounding noise on both sides.
            continue
        cosine = functional.cosine_similarity(expected.grad.flatten(), got.grad.flatten(), dim=0)
        assert cosine > 0.95, name
        assert got.grad.norm() == pytest.approx(expected.grad.norm().item(), rel=0.2)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("island", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.05),
        lambda parameters: torch.optim.SGD(parameters, 0.02, 0.9, weight_decay=1e-3),
        lambda parameters: torch.optim.Adam(parameters, 0.003),
        lambda parameters: torch.optim.AdamW(parameters, 0.003, weight_decay=0.1),
    ],
)
def test_every_optimizer_trains_as_in_fp32(optimizer, island):
    data = batches(2, size=32) * 40
    plain, module = network(island=island), int8_(network(island=island), unsupported="fp32")
    expected = train(plain, optimizer(plain.parameters()), data)
    got = train(module, optimizer(module.parameters()), data)
    assert expected[-1] < 0.6 * expected[0]
    # They follow the same curve.
    assert np.mean(np.abs(np.subtract(got, expected))) < 0.12 * expected[0]


def test_momentum_and_weight_decay_hold_in_fp32_operators():
    """A step changes the parameter of an FP32 operator by what torch's optimiser makes of its gradient."""
    module = int8_(network(island=True), unsupported="fp32")
    factor = module[6].factor
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    velocity = torch.zeros_like(factor)
    for inputs, labels in batches(3):
        before = factor.detach().clone()
        train(module, optimizer, [(inputs, labels)])
        velocity = 0.9 * velocity + factor.grad + 0.01 * before
        torch.testing.assert_close(factor.detach(), before - 0.1 * velocity)
    assert velocity.any()


def test_a_schedule_is_torchs():
    module = int8_(network())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    train(module, optimizer, batches(4), schedule=schedule)
    before = copy.deepcopy(dict(module.named_parameters()))
    assert schedule.get_last_lr() == [pytest.approx(0.0, abs=1e-9)]
    train(module, optimizer, batches(1))
    for name, part in module.named_parameters():
        torch.testing.assert_close(part, before[name], atol=1e-7, rtol=0)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        lambda logits, labels: functional.cross_entropy(logits, labels, label_smoothing=0.1),
        lambda logits, labels: functional.mse_loss(logits, functional.one_hot(labels, 4).float()),
        lambda logits, labels: functional.cross_entropy(logits, labels, torch.arange(1.0, 5.0)),
        lambda logits, labels: 1e-3 * functional.cross_entropy(logits, labels, reduction="sum"),
    ],
)
def test_every_loss_trains(loss):
    module = int8_(network())
    losses = train(
        module, torch.optim.Adam(module.parameters(), 0.01), batches(1, 32) * 40, loss=loss
    )
    assert losses[-1] < 0.5 * losses[0]


def test_gradients_accumulate_and_passes_may_wait():
    """Two passes whose losses are added give the sum of their gradients, as does one after the other."""
    first, second = batches(2)
    one, other = int8_(network()), int8_(network())
    for inputs, labels in (first, second):
        functional.cross_entropy(one(inputs), labels).backward()
    results = [(other(inputs), labels) for inputs, labels in (first, second)]
    sum(functional.cross_entropy(logits, labels) for logits, labels in results).backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)
    assert same(one, other)


def test_results_without_backward_do_not_fill_memory():
    module = int8_(network())
    inputs, _ = batches(1)[0]
    for _ in range(5):
        module(inputs)
    (engine,) = module.forward._engines.values()
    assert len(engine._layers._engines) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_trains_apart_from_the_original_with_the_same_bits(copied):
    data = batches(6)
    one = int8_(network(island=True), unsupported="fp32")
    train(one, torch.optim.SGD(one.parameters(), 0.05), data[:3])
    other = copied(one)
    assert same(one, other)
    for module in (one, other):
        train(module, torch.optim.SGD(module.parameters(), 0.05), data[3:])
    assert same(one, other)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not same(one, other)
    # The copy computes with its own weights.
    assert not torch.equal(one.eval()(data[0][0]), other.eval()(data[0][0]))


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", REACH)
def test_every_operator_trains_in_copies_and_resumes_with_the_same_bits(name):
    data = [
        (torch.from_numpy(images), torch.from_numpy(labels).long())
        for images, labels in networks.batches(6)
    ]
    one = int8_(networks.build(name), unsupported="refuse")
    train(one, torch.optim.SGD(one.parameters(), 0.05), data[:3])
    resumed = int8_(networks.build(name, seed=5), unsupported="refuse")
    resumed.load_state_dict(one.state_dict())
    others = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), resumed]
    expected = train(one, torch.optim.SGD(one.parameters(), 0.05), data[3:])
    for other in others:
        assert train(other, torch.optim.SGD(other.parameters(), 0.05), data[3:]) == expected
        assert same(one, other)
        assert torch.equal(one.eval()(data[0][0]), other.eval()(data[0][0]))
        one.train()


def test_torch_save_keeps_the_module():
    one, file = int8_(network()), io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    inputs, _ = batches(1)[0]
    assert torch.equal(one.eval()(inputs), other.eval()(inputs))


@pytest.mark.parametrize("island", [False, True])
def test_a_training_resumed_from_state_dicts_has_the_same_bits(island):
    data = batches(130, size=4)
    one = int8_(network(island=island), unsupported="fp32")
    optimizer = torch.optim.AdamW(one.parameters(), 0.003)
    train(one, optimizer, data[:120])
    other = int8_(network(seed=5, island=island), unsupported="fp32")
    other.load_state_dict(one.state_dict())
    resumed = torch.optim.AdamW(other.parameters(), 0.003)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(one, optimizer, data[120:]) == train(other, resumed, data[120:])
    assert same(one, other)


def test_a_resumed_training_with_dropout_needs_torchs_generator_only():
    def made():
        torch.manual_seed(0)
        return int8_(
            nn.Sequential(
                nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)
            )
        )

    data, losses = batches(8), []
    for cut in (8, 4):
        module = made()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(3)
        found = train(module, optimizer, data[:cut])
        state, generator = module.state_dict(), torch.get_rng_state()
        module = made()
        module.load_state_dict(state)
        torch.set_rng_state(generator)
        found += train(module, torch.optim.SGD(module.parameters(), 0.1), data[cut:])
        losses.append(found)
    assert losses[0] == losses[1]


def test_evaluation_uses_running_statistics_and_changes_nothing():
    module = int8_(network())
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    train(module, optimizer, batches(30))
    tracked = module[1].num_batches_tracked.item()
    assert tracked == 30
    before = copy.deepcopy(module.state_dict())
    inputs, _ = batches(1, seed=7)[0]
    got = module.eval()(inputs)
    plain = network()
    plain.load_state_dict(module.state_dict())
    expected = plain.eval()(inputs)
    assert functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 0.99
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    refused(lambda: got.sum().backward(), "evaluation", "module.train()")
    with torch.no_grad():
        assert torch.equal(module(inputs), got)


def test_a_part_of_a_model_trains_in_int8_between_fp32_layers():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GELU(),
        int8_(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())),
        nn.Flatten(),
        nn.Linear(8 * 64, 4),
    )
    losses = train(model, torch.optim.Adam(model.parameters(), 0.003), batches(1, 32) * 40)
    assert model[0].weight.grad.any()
    assert losses[-1] < 0.3 * losses[0]


def test_frozen_parameters_get_no_gradient_and_may_thaw():
    module = int8_(network())
    for part in module[:2].parameters():
        part.requires_grad_(False)
    train(module, torch.optim.SGD(module.parameters(), 0.05), batches(2))
    assert module[0].weight.grad is None
    assert module[5].weight.grad.any()
    module[0].weight.requires_grad_(True)
    train(module, torch.optim.SGD(module.parameters(), 0.05), batches(1))
    assert module[0].weight.grad.any()


def test_any_trainer_of_the_package_takes_the_module():
    data = batches(1, 32) * 30
    module = int8_(network())
    session = FP32Trainer(optimizer=sgd(0.05, momentum=0.9)).start(
        module, TrainingSpan(total_steps=30, steps_per_epoch=30)
    )
    losses = [session.step([pair]).item() for pair in data]
    session.finish()
    assert losses[-1] < 0.3 * losses[0]
    other = int8_(network())
    optimizer = torch.optim.SGD(other.parameters(), 0.05, momentum=0.9)
    # `FP32Trainer` takes the rate of its schedule in each step.
    assert train(other, optimizer, data[:1]) == losses[:1]


def test_threads_and_kernels_change_no_bit():
    from socflower import _int8

    data, found = batches(3), []
    for settings in [{"num_threads": 2}, *({"kernel": name} for name in _int8.available_kernels())]:
        module = int8_(network(), **settings)
        train(module, torch.optim.SGD(module.parameters(), 0.05), data)
        found.append(module)
    assert all(same(found[0], each) for each in found[1:])


def test_checkpointing_repeats_the_forward_pass_with_the_same_gradients():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.5))
    inputs = batches(1)[0][0].requires_grad_()
    gradients = []
    for again in (False, True):
        module = int8_(copy.deepcopy(layers))
        torch.manual_seed(2)
        made = checkpoint(module, inputs, use_reentrant=False) if again else module(inputs)
        made.square().sum().backward()
        gradients.append(module[0].weight.grad)
    assert torch.equal(*gradients)


def test_tensors_that_int8_does_not_have_are_refused():
    inputs, _ = batches(1)[0]
    refused(lambda: int8_(network())(inputs.bfloat16()), "inputs", "bfloat16", "float()")
    refused(lambda: int8_(network().bfloat16())(inputs), "0.weight", "bfloat16", "float()")
    refused(lambda: int8_(network())(inputs.double()), "inputs", "float64")
    refused(lambda: int8_(network())([inputs]), "list")
    refused(lambda: int8_(network())(inputs[:, :2]), "(2, 8, 8)")
    refused(lambda: int8_(network(), unsupported="no"), "unsupported", "no")
    refused(
        lambda: int8_(network(island=True), unsupported="refuse")(inputs),
        "prelu",
        "int8_(module, unsupported='fp32')",
    )
    module = int8_(network())
    module[1].eval()
    refused(lambda: module(inputs), "BatchNorm2d", "training mode")


def test_a_step_between_forward_and_backward_is_refused():
    module = int8_(network())
    (inputs, labels), (others, _) = batches(2)
    loss = functional.cross_entropy(module(inputs), labels)
    with torch.no_grad():
        module[0].weight.mul_(2.0)
    module(others)
    refused(loss.backward, "between the forward pass and its backward pass")


def test_the_engine_holds_what_the_module_has():
    module = int8_(network())
    inputs, _ = batches(1)[0]
    module(inputs)
    (engine,) = module.forward._engines.values()
    inside = engine._layers.engine
    exported = export_parameters(inside.graph, inside.parameters)
    for name, part in module.named_parameters():
        quantum = 2.0 ** inside.parameters.exponents.get(name, -149)
        assert np.abs(exported[name] - part.detach().numpy()).max() <= quantum / 2


# --------------------------------------------------------------------------------------- sequences and tokens


def encoder_layer():
    return nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


class Words(nn.Module):
    """A classifier of ten words of 30: embedding and head around an encoder."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(30, 16)
        self.encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.encoder(self.words(tokens)).mean(1))


def sentences(count, size=16, seed=1):
    """Return batches whose class is the first word's rest by four."""
    random = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(30, (size, 10), generator=random) for _ in range(count)]
    return [(own, own[:, 0] % 4) for own in tokens]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "encoder"])
def test_a_transformer_of_tokens_trains_whole_or_in_part_as_in_fp32(part):
    fp32, int8 = Words(), Words()
    int8_(int8.get_submodule(part), unsupported="refuse")
    tokens, _ = sentences(1)[0]
    expected = fp32(tokens).detach()
    assert (int8(tokens) - expected).norm() < 0.1 * expected.norm()
    losses = [
        train(model, torch.optim.Adam(model.parameters(), 0.005), sentences(2) * 40)
        for model in (fp32, int8)
    ]
    assert all(own[-1] < 0.1 * own[0] for own in losses)
    assert fp32.state_dict().keys() == int8.state_dict().keys()
    with torch.no_grad():
        int8.eval()
        assert (int8(tokens).argmax(1) == sentences(1)[0][1]).all()


def test_layers_of_an_encoder_are_called_with_arguments_that_are_left_out():
    model = Words()
    for layer in model.encoder.layers:
        int8_(layer)
    tokens, _ = sentences(1)[0]
    model(tokens).sum().backward()
    assert all(part.grad is not None for part in model.parameters())
    mask = torch.ones(16, 10, dtype=torch.bool)
    embedded = model.words(tokens)
    refused(
        lambda: model.encoder.layers[0](embedded, src_key_padding_mask=mask),
        "TransformerEncoderLayer",
        "src_key_padding_mask",
    )


def test_a_module_of_sequences_has_its_own_statistics_and_resumes_with_the_same_bits():
    def made(seed):
        torch.manual_seed(seed)
        return int8_(
            nn.Sequential(
                nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 10)
            )
        )

    def loss(result, labels):
        return functional.cross_entropy(result.flatten(1), labels)

    random = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(16, 6, 10, generator=random), torch.randint(4, (16,), generator=random))
        for _ in range(12)
    ]
    one = made(0)
    optimizer = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
    train(one, optimizer, data[:8], loss=loss)
    assert one[1].num_batches_tracked == 8
    assert one[1].running_mean.any()
    other = made(1)
    other.load_state_dict(one.state_dict())
    resumed = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(one, optimizer, data[8:], loss=loss) == train(other, resumed, data[8:], loss=loss)
    assert same(one, other)


def test_a_token_that_does_not_exist_is_named():
    model = int8_(Words())
    tokens, _ = sentences(1)[0]
    model(tokens)
    refused(lambda: model(tokens + 30), "words", "0 to 29")
