"""Batches and federated rounds of Mandheling's phones, by the cost model and the catalogue of devices.

MNN in FP32 is the CPU, MNN in int8 the CPU in int8, and Mandheling the DSP, which computes a whole batch here. The
catalogue's rates follow from Table 8, so they include the gains of the paper's techniques; none depends on the batch.
"""

from functools import cache
from typing import NamedTuple

from socflower.cluster import ModelProfile, StepCost, device, parse_cluster, step_cost
from socflower.cluster.hub_round import Payload, Training, local_round
from socflower.sim import EventClock
from socflower.workloads.models.built_in import built_in_profile

MNN, MNN_INT8, DSP = "MNN-FP32", "MNN-INT8", "Ours"
PROCESSORS = {MNN: "cpu", MNN_INT8: "cpu-int8", DSP: "npu"}
XIAOMI_11, XIAOMI_10, REDMI = "snapdragon-888", "snapdragon-865", "snapdragon-750g"
PHONES = (XIAOMI_11, XIAOMI_10, REDMI)
BATCH = 64
MODELS = {
    "VGG-11": "vgg11",
    "VGG-16": "vgg16",
    "ResNet-18": "resnet18",
    "ResNet-34": "resnet34",
    "InceptionV3": "inception-v3",
}
EPOCHS, EPOCH_SAMPLES = 150, 50_000


class Cost(NamedTuple):
    """What a batch or a training takes."""

    duration_s: float
    energy_j: float


@cache
def profile_of(label: str) -> ModelProfile:
    """Return the profile of a network on 32x32 colour images; of LeNet on grey ones of 28x28."""
    if label == "LeNet":
        return built_in_profile("lenet5", 1, 28)
    return built_in_profile(MODELS[label], 3, 32)


def batch_cost(label: str, method: str, phone: str = XIAOMI_11, batch: int = BATCH) -> Cost:
    """Return the seconds and joules of a training batch."""
    cost = _step(label, method, phone, batch)
    seconds = cost.compute_s + cost.update_s
    return Cost(seconds, seconds * device(phone).processor(PROCESSORS[method]).active_w)


def _step(label: str, method: str, phone: str, batch: int) -> StepCost:
    return step_cost(profile_of(label), device(phone), batch, PROCESSORS[method])


def centralised_cost(label: str, method: str) -> Cost:
    """Return a training of Table 8 on one Xiaomi 11 Pro."""
    batch, num_batches = batch_cost(label, method), EPOCHS * EPOCH_SAMPLES / BATCH
    return Cost(num_batches * batch.duration_s, num_batches * batch.energy_j)


CLIENTS_A_ROUND, CLIENT_BATCH = 10, 20
"""As in "Adaptive Federated Optimization" (Reddi et al. 2021), the paper's reference for FEMNIST."""

CLIENTS = {"LeNet": (3_400, 671_585), "VGG-16": (500, 50_000)}
"""Clients and samples of all: FEMNIST and CIFAR-100 in the same article."""


def model_bytes(label: str, method: str) -> float:
    """Return the bytes of a model on the wire: int8 weights are a quarter of those in FP32."""
    return profile_of(label).weight_bytes / (1.0 if method == MNN else 4.0)


@cache
def federated_round(label: str, method: str) -> Cost:
    """Return the seconds of a round of FedAvg on Xiaomi 11 Pros, and the joules of a client that takes part.

    Each client trains for one epoch on its samples, with the catalogue's links to a hub whose own link they share.
    """
    clients, num_samples = CLIENTS[label]
    cost = _step(label, method, XIAOMI_11, CLIENT_BATCH)
    num_batches = num_samples / clients / CLIENT_BATCH
    graph = local_round(
        dict.fromkeys(range(CLIENTS_A_ROUND), Training(cost=cost, num_batches=num_batches)),
        Payload(model_bytes(label, method), profile_of(label).num_tensors),
    )
    phones = parse_cluster({"boards": [1] * CLIENTS_A_ROUND, "device": XIAOMI_11})
    usage = EventClock(phones).run(graph)
    return Cost(usage.duration_s, sum(usage.energy_j.values()) / CLIENTS_A_ROUND)


def federated_cost(label: str, method: str, num_rounds: float) -> Cost:
    """Return the seconds of a federated training, and the joules of a client, which is drawn now and then."""
    one = federated_round(label, method)
    drawn = num_rounds * CLIENTS_A_ROUND / CLIENTS[label][0]
    return Cost(num_rounds * one.duration_s, drawn * one.energy_j)
