"""One device, which does the works that it is given."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.pipeline_contest.work import (
    SPAN,
    VGG,
    Carry,
    Federated,
    Passes,
    Profile,
    Profiled,
    Speed,
    Train,
    Trained,
    Transfers,
    Work,
    minis,
)
from socflower.allocator import keep_freed_memory
from socflower.peers.transports.port import RingPort
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.profiler.measuring import measure_layers
from socflower.pipeline.runtime.channels import run_script
from socflower.pipeline.runtime.gloo_channels import GlooChannels
from socflower.pipeline.runtime.member import Member
from socflower.pipeline.runtime.messages import ACTIVATIONS, GRADIENTS, Receive, Reduce, Send
from socflower.pipeline.runtime.micro_batches import micro_batches
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.pipeline.schedule.order import Pass, operations
from tests.testbed.topology import Rack

_PORT, _TORCH_PORT = 28200, 29400
_TOKEN = b"for benchmarks, everybody's key."
_PATIENCE_S = 300.0
_UPDATES = 10


class Device:
    """A SoC of a rack; `do` is called with the same work and number on all SoCs that the work needs."""

    def __init__(self, soc: int, rack: Rack) -> None:
        self._soc, self._rack = soc, rack
        addresses = [f"{rack.address(each)}:{_PORT}" for each in range(rack.num_socs)]
        self._port = RingPort(
            addresses[soc],
            rank=soc,
            addresses=addresses,
            token=_TOKEN,
            tls=None,
            heartbeat_s=_PATIENCE_S,
        )
        keep_freed_memory()

    def do(self, work: Work, number: int, socs: Sequence[int]) -> Any:
        """Do a work and return its result."""
        if isinstance(work, Profile):
            return self._profile(work)
        if isinstance(work, Speed):
            return self._speed(work)
        if isinstance(work, Passes):
            return self._passes(work)
        if isinstance(work, Train) and work.by_torch:
            return self._train_by_torch(work, number)
        channels = GlooChannels(self._port, socs, socs, number, _PATIENCE_S)
        try:
            channels.join()
            if isinstance(work, Train):
                return self._train(work, channels)
            if isinstance(work, Carry):
                return self._carry(work, channels, socs)
            if isinstance(work, Federated):
                return self._federated(work, channels, socs)
            assert isinstance(work, Transfers)
            return self._transfers(work, channels, socs)
        finally:
            channels.close()

    def _profile(self, work: Profile) -> Profiled:
        """Measure processor time, since a quota may halt a layer, and divide it by the cores that it gets."""
        workload = work.workload
        module, batch = workload.build(), workload.data().batch(torch.arange(1))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        measured = measure_layers(
            module,
            workload.example(),
            work.batches,
            repeats=work.repeats,
            chain=workload.read(module).chain,
            clock=time.process_time,
        )
        session = workload.trainer.start(module, SPAN)
        session.gradients([batch], 1)
        session.apply()
        update_s = time.process_time()
        for _ in range(_UPDATES):
            session.apply()
        update_s = (time.process_time() - update_s) / _UPDATES
        cores = (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)
        return Profiled(
            forward_s=measured.forward_s / cores,
            backward_s=measured.backward_s / cores,
            update_s=update_s / cores,
            cores=cores,
        )

    def _speed(self, work: Speed) -> float:
        """Return the seconds of both passes of a batch."""
        session = work.workload.trainer.start(work.workload.build(), SPAN)
        batch = work.workload.data().batch(torch.arange(work.batch_size))
        session.gradients([batch], work.batch_size)
        began_s, count = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - began_s) < work.seconds:
            session.gradients([batch], work.batch_size)
            count += 1
        return spent_s / count

    def _carry(self, work: Carry, channels: GlooChannels, socs: Sequence[int]) -> float:
        """Return the processor seconds per byte: the delay of the passes by the messages."""
        other, number = next(soc for soc in socs if soc != self._soc), 0
        session = work.workload.trainer.start(work.workload.build(), SPAN)
        batch = work.workload.data().batch(torch.arange(work.batch_size))
        session.gradients([batch], work.batch_size)
        message = Receive(other, ACTIVATIONS, work.num_bytes)
        self._meet(channels, socs)
        began_s, count = time.perf_counter(), 0
        channels.expect([message] * work.num_messages)
        for _ in range(work.num_messages):
            channels.send(other, ACTIVATIONS, bytearray(work.num_bytes))
        while (
            number < work.num_messages or channels.sent_bytes < work.num_messages * work.num_bytes
        ):
            session.gradients([batch], work.batch_size)
            count += 1
            while number < work.num_messages and channels.has_arrived(message):
                channels.receive(message)
                number += 1
        spent_s = time.perf_counter() - began_s
        self._meet(channels, socs)
        return (spent_s - count * work.pass_s[self._soc]) / (2 * work.num_messages * work.num_bytes)

    def _train(self, work: Train, channels: GlooChannels) -> Trained:
        member = self._member(work, channels.send, work.coding)
        began_s, ends_s = time.monotonic(), []
        for mini in minis(work):
            run_script(member.update(mini), channels)
            ends_s.append(time.monotonic())
        channels.flush()
        end = run_script(member.finish(), channels)
        channels.flush()
        return Trained(
            began_s=began_s,
            ends_s=tuple(ends_s),
            weights={}
            if end is None
            else {name: tensor.numpy() for name, tensor in end.weights.items()},
        )

    def _member(self, work: Train | Passes, send: Send, coding: ActivationCoding = EXACT) -> Member:
        workload, module = work.workload, work.workload.build()
        return Member(
            work.plan,
            self._soc,
            workload.read(module),
            module,
            workload.trainer,
            SPAN,
            data=workload.data(),
            send=send,
            coding=coding,
        )

    def _train_by_torch(self, work: Train, number: int) -> Trained:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import Schedule1F1B

        plan = work.plan
        assert isinstance(plan, PipelinePlan)
        workload, data = work.workload, work.workload.data()
        rank, size, module = plan.socs.index(self._soc), len(plan.stages), workload.build()
        chain, stage = workload.read(module).chain, plan.stages[rank]
        own = chain.module(module, stage.first_layer, stage.last_layer).train()
        with torch.no_grad():
            entering: Any = workload.example().repeat(
                plan.micro_batch_size, *[1] * (workload.example().dim() - 1)
            )
            if rank:
                (entering,) = chain.module(module, 0, stage.first_layer - 1)(entering)
            leaving = own(entering)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._rack.address(plan.socs[0])}:{_TORCH_PORT + number}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_PATIENCE_S),
        )
        schedule = Schedule1F1B(
            PipelineStage(
                own,
                rank,
                size,
                torch.device("cpu"),
                input_args=entering.requires_grad_(rank > 0),
                output_args=leaving
                if rank == size - 1
                else tuple(each.requires_grad_() for each in leaving),
            ),
            plan.num_micro_batches,
            loss_fn=functional.cross_entropy,
        )
        session = workload.trainer.start(own, SPAN)
        dist.barrier()
        began_s, ends_s = time.monotonic(), []
        for mini in minis(work):
            session.begin()
            inputs, labels = data.batch(torch.from_numpy(mini.indices))
            if rank == 0:
                schedule.step(inputs)
            elif rank == size - 1:
                schedule.step(target=labels)
            else:
                schedule.step()
            session.apply()
            ends_s.append(time.monotonic())
        dist.barrier()
        dist.destroy_process_group()
        return Trained(
            began_s=began_s,
            ends_s=tuple(ends_s),
            weights={name: tensor.numpy() for name, tensor in own.state_dict().items()},
        )

    def _federated(self, work: Federated, channels: GlooChannels, socs: Sequence[int]) -> Trained:
        module, data, own = VGG.build(), VGG.data(), work.samples[self._soc]
        session = VGG.trainer.start(module, SPAN)
        weights = list(module.parameters())
        rng = np.random.default_rng(self._soc)
        began_s, ends_s = time.monotonic(), []
        for _ in range(work.num_rounds):
            for first in range(0, own, work.batch_size):
                size = min(work.batch_size, own - first)
                session.gradients(
                    [data.batch(torch.from_numpy(rng.integers(0, len(data), size)))], size
                )
                session.apply()
            share = own / sum(work.samples)
            mean = torch.cat([weight.detach().flatten() for weight in weights]) * share
            channels.all_reduce(Reduce(tuple(socs), mean))
            with torch.no_grad():
                for weight, part in zip(
                    weights, mean.split([weight.numel() for weight in weights]), strict=True
                ):
                    weight.copy_(part.view_as(weight))
            ends_s.append(time.monotonic())
        channels.flush()
        self._meet(channels, socs)
        return Trained(
            began_s=began_s,
            ends_s=tuple(ends_s),
            weights={name: tensor.numpy() for name, tensor in module.state_dict().items()},
        )

    def _passes(self, work: Passes) -> Trained:
        """Run the passes of a stage on zeros instead of received activations."""
        index = next(
            number for number, each in enumerate(work.plan.stages) if self._soc in each.devices
        )
        stage, data = work.plan.stages[index], work.workload.data()
        member = self._member(work, lambda *_: None).stage
        assert member is not None
        own = member.work
        began_s = time.monotonic()
        for mini in minis(work):
            batches = micro_batches(work.plan, len(mini.indices))
            kept = {}
            for operation in operations(work.plan.policy, stage.in_flight, len(batches)):
                batch = batches[operation.micro_batch]
                first, stop = batch.interval(index, 0)
                inputs, labels = data.batch(
                    torch.from_numpy(mini.indices[batch.first : batch.first + batch.size])
                )
                if operation.kind == Pass.FORWARD:
                    entering = (
                        (inputs,)
                        if index == 0
                        else [torch.zeros(stop - first, *one.shape) for one in own.entering]
                    )
                    kept[batch.number] = own.forward(
                        batch.number,
                        entering,
                        stream=0,
                        labels=labels if own.loss is not None else None,
                    )
                else:
                    own.backward(batch.number, kept.pop(batch.number) if own.loss is None else ())
        return Trained(began_s=began_s, ends_s=(time.monotonic(),))

    def _transfers(self, work: Transfers, channels: GlooChannels, socs: Sequence[int]) -> Trained:
        other = next(soc for soc in socs if soc != self._soc)
        lanes = (ACTIVATIONS, GRADIENTS) if self._soc == socs[0] else (GRADIENTS, ACTIVATIONS)
        self._meet(channels, socs)
        began_s = time.monotonic()
        channels.expect([Receive(other, lanes[1], work.num_bytes)] * work.num_messages)
        for _ in range(work.num_messages):
            channels.send(other, lanes[0], bytearray(work.num_bytes))
        for _ in range(work.num_messages):
            channels.receive(Receive(other, lanes[1], work.num_bytes))
        channels.flush()
        ended_s = time.monotonic()
        self._meet(channels, socs)
        return Trained(began_s=began_s, ends_s=(ended_s,))

    def _meet(self, channels: GlooChannels, socs: Sequence[int]) -> None:
        """Wait for all devices, so that none closes its channels while another may still read."""
        channels.all_reduce(Reduce(tuple(socs), torch.zeros(len(socs))))
        channels.flush()
