"""Frozen parameters stay at their nodes, which check that they have those of the server."""

import copy

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn

from socflower.clients.app import make_client_app
from socflower.flower_adapter import begin_run
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.model_state import frozen_digest, trainable_state
from socflower.wire.message_keys import FROZEN_SHA256, GroupTask
from tests.clients.test_app import node, part
from tests.one_line import refused
from tests.training.test_batches import task
from tests.training.test_group import small_network

GROUP = task(0, 1, num_samples=48, num_steps=3)


def half_frozen(*, norm: bool = True, changed: bool = False) -> nn.Module:
    model = small_network(norm=norm)
    model[0].requires_grad_(False)
    if changed:
        model[0].weight.data[0, 0, 0, 0] += 1e-3
    return model


def asked(
    arrays: dict[str, torch.Tensor], group: GroupTask | None, kind: str = "train", **config: object
) -> Message:
    begin_run(1)
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord(config)})
    if group is not None:
        content["group"] = ConfigRecord(group.encode())
    return Message(content, 5, kind)


def answered(message: Message, model: nn.Module) -> dict[str, torch.Tensor]:
    app = make_client_app(
        lambda context: model, part, FP32Trainer(optimizer=sgd(0.1, 0.9)), evaluate_data_fn=part
    )
    return app(message, node(2)).content.array_records["arrays"].to_torch_state_dict()


@pytest.mark.parametrize("group", [None, GROUP])
def test_only_what_trains_travels_and_the_training_is_the_same(group: GroupTask | None) -> None:
    server = half_frozen()
    config = {FROZEN_SHA256: frozen_digest(server)}
    reply = answered(asked(trainable_state(server), group, **config), half_frozen())
    whole = answered(asked(server.state_dict(), group), half_frozen())
    assert set(reply) == set(trainable_state(server)) < set(whole) == set(server.state_dict())
    assert all(torch.equal(reply[name], whole[name]) for name in reply)
    assert torch.equal(whole["0.weight"], server[0].weight)
    assert not torch.equal(whole["1.running_mean"], server[1].running_mean)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_node_with_another_base_is_refused(kind: str) -> None:
    server = half_frozen()
    message = asked(trainable_state(server), None, kind, **{FROZEN_SHA256: frozen_digest(server)})
    refused(lambda: answered(message, half_frozen(changed=True)), "frozen")
    everything = small_network(norm=True)
    refused(lambda: answered(message, everything), "0.weight")


def test_a_base_that_was_sent_needs_no_digest_and_is_loaded() -> None:
    reply = answered(asked(half_frozen().state_dict(), None), half_frozen(changed=True))
    assert torch.equal(reply["0.weight"], half_frozen()[0].weight)


def test_without_a_digest_nobody_could_know_that_bases_are_the_same() -> None:
    refused(
        lambda: answered(asked(trainable_state(half_frozen()), None), half_frozen()),
        "frozen_digest",
    )


@pytest.mark.slow
def test_lora_on_a_frozen_language_model_sends_a_fiftieth() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=256, n_layer=6, n_head=4)
    )
    full_bytes = sum(tensor.nbytes for tensor in base.state_dict().values())
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    sent = trainable_state(model)
    assert sum(tensor.nbytes for tensor in sent.values()) < 0.02 * full_bytes
    assert {name for name in sent if "lora" not in name} == set()
