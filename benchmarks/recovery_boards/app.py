"""The app of `benchmarks/recovery.py`: a deep perceptron of 8.4 MB over four boards, and its plans."""

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from socflower.clients.app import make_client_app
from socflower.cluster import Cluster, parse_cluster
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.module_problem import pipeline_problem
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.workloads.dataset import LabelledData
from tests.pipeline.problems import straight_plan
from tests.strategies import pipeline_app

NUM_SAMPLES, BATCH, WIDTH, DEPTH = 768, 32, 512, 8


def perceptron() -> nn.Module:
    """Return the model with its initial weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def vectors() -> LabelledData:
    """Return samples of four classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
    inputs = torch.randn(NUM_SAMPLES, 1, 1, WIDTH, generator=generator)
    inputs[torch.arange(NUM_SAMPLES), 0, 0, labels] += 3.0
    return LabelledData(inputs=inputs, labels=labels, mean=(0.0,), std=(1.0,), num_classes=4)


def trainer() -> FP32Trainer:
    """Return how stages train."""
    return FP32Trainer(optimizer=sgd(0.01), device="cpu")


def boards() -> Cluster:
    """Return four boards on 1 Gbit/s."""
    return parse_cluster(
        {"name": "boards", "soc_bytes_per_s": 125e6}, [{"count": 4, "device": "jetson-nano"}]
    )


def problem() -> PipelineProblem:
    """Return the planning problem of the pipeline."""
    return pipeline_problem(perceptron(), (1, 1, WIDTH), boards(), batch_size=BATCH)


def plans() -> dict[str, PipelinePlan]:
    """Return a plan with four stages, and one whose first stage is on two boards."""
    last = problem().model.num_layers - 1
    return {
        "four stages": straight_plan((1, 3, 5, last), ((8,),) * 4, 4),
        "a stage of two boards": straight_plan((3, 5, last), ((4, 4), (8,), (8,)), 4),
    }


def client_app() -> ClientApp:
    """Return the ClientApp of a board."""
    pipeline_app.fail_on_request()

    def model(context: Context) -> nn.Module:
        return perceptron()

    return make_client_app(
        model,
        lambda context, partition, count: vectors(),
        trainer(),
        mods=[pipeline_app.failing],
        extra_keys=pipeline_app.KEYS,
    )
