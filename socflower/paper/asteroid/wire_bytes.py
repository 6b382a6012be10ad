"""Eqs. 1 and 2 on the wire: the bytes of the messages that devices send while a small model trains (§2.3).

Every device of a plan is a thread whose messages are counted. All pipelines of three devices run, and all divisions of
the devices into pipelines, with cuts behind any layer. Groups of a division sum their gradients in rings of the devices
that hold the same layers, so 2(G − 1)P bytes replace the 2GP bytes of Eq. 1's server.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from socflower.paper.asteroid.settings import NANO, cluster_of
from socflower.paper.asteroid.volumes import divisions, hybrid_pipelines
from socflower.pipeline.plan import Plan, Sync
from socflower.pipeline.profiler.estimates import estimated_problem
from socflower.pipeline.profiler.layers import ReadModel, read_model
from socflower.pipeline.runtime.channels import QueueChannels, run_script
from socflower.pipeline.runtime.member import Member, Mini
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.trainer import TrainingSpan
from socflower.workloads.dataset import LabelledData
from socflower.workloads.models.classifiers import build_model

_DEVICES, _MICRO_BATCH, _MICRO_BATCHES = 3, 7, 2
_SIZE, _CLASSES = 28, 10
_KEYS = {"hybrid": "hybrid pipelines over Eq. 2", "rings": "divisions over Eq. 1 with rings",
         "server": "divisions over Eq. 1"}  # fmt: skip


def equations() -> Mapping[str, float | bool | str]:
    """Return the least and the greatest ratio of sent bytes to those of the equations, over all plans."""
    module = build_model(
        "lenet5",
        in_channels=1,
        image_size=_SIZE,
        num_classes=_CLASSES,
        seed=0,
    )
    read = read_model(module, (1, _SIZE, _SIZE), "lenet5")
    problem = estimated_problem(
        read.model,
        cluster_of((NANO,) * _DEVICES, 100),
        micro_batch_size=_MICRO_BATCH,
        num_micro_batches=_MICRO_BATCHES,
    )
    samples, minis = _samples(problem.mini_batch_size)

    ratios: dict[str, list[float]] = {}

    def count(plan: Plan, **equations: Plan) -> None:
        sent = sent_bytes(plan, read, module, samples, minis)
        for key, equation in equations.items():
            ratios.setdefault(_KEYS[key], []).append(sent / equation.communication_bytes(problem))

    for each in hybrid_pipelines(problem):
        pipeline = each.plan(problem)
        count(pipeline, hybrid=pipeline)
    for division in divisions(problem):
        plan = division.plan(problem)
        in_rings = replace(plan, sync=Sync.RING)
        count(in_rings, rings=in_rings, server=plan)
    found: dict[str, float | bool | str] = {}
    for key, own in ratios.items():
        found |= {f"{key}, least": min(own), f"{key}, most": max(own)}
    return found


def sent_bytes(
    plan: Plan,
    read: ReadModel,
    module: nn.Module,
    data: LabelledData,
    minis: Sequence[Mini],
) -> int:
    """Return the bytes of all messages of the updates `minis` of a plan; `module` is not changed.

    Each device reads the samples and labels that it needs.
    """
    channels = QueueChannels.of(plan.socs)
    # For torch's own cross-entropy, devices with a loss would also exchange the number of labels that count.
    trainer = FP32Trainer(optimizer=sgd(0.1), device="cpu", loss=_mean_over_samples)
    failures: list[BaseException] = []

    def train(soc: int, member: Member) -> None:
        try:
            for mini in minis:
                run_script(member.update(mini), channels[soc])
            channels[soc].flush()
        except BaseException as error:
            failures.append(error)
            for other in channels.values():
                other.close()

    threads = []
    for soc in plan.socs:
        member = Member(
            plan,
            soc,
            read,
            copy.deepcopy(module),
            trainer,
            TrainingSpan(seed=(0, 0)),
            data=data,
            send=channels[soc].send,
        )
        threads.append(threading.Thread(target=train, args=(soc, member), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in channels.values():
        own.close()
    if failures:
        raise failures[0]
    return sum(own.sent_bytes for own in channels.values())


def _mean_over_samples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels)


def _samples(count: int) -> tuple[LabelledData, list[Mini]]:
    """Return random images, and the update of all of them."""
    generator = torch.Generator().manual_seed(0)
    data = LabelledData(
        torch.randn(count, 1, _SIZE, _SIZE, generator=generator),
        torch.randint(0, _CLASSES, (count,), generator=generator),
        (0.0,),
        (1.0,),
        _CLASSES,
    )
    return data, [Mini(step=0, indices=np.arange(count))]
