"""One device: it does the work that it is given, one after the other."""

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
    SHAPE,
    SPAN,
    TRAINER,
    Federated,
    Passes,
    Profile,
    Profiled,
    Train,
    Trained,
    Transfers,
    Work,
    build_data,
    build_model,
    build_wide_model,
    minis,
    read,
)
from socflower.allocator import keep_freed_memory
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.profiler.measuring import measure_layers
from socflower.pipeline.runtime.channels import run_script
from socflower.pipeline.runtime.gloo_channels import GlooChannels
from socflower.pipeline.runtime.member import ACTIVATIONS, GRADIENTS, Member, Receive, Reduce
from socflower.pipeline.runtime.micro_batches import micro_batches
from socflower.pipeline.schedule.order import Pass, operations
from socflower.rings.transports.port import RingPort
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
        self._port = RingPort(addresses[soc], rank=soc, addresses=addresses, token=_TOKEN, tls=None,
                              heartbeat_s=_PATIENCE_S)
        self._data = build_data()
        keep_freed_memory()

    def do(self, work: Work, number: int, socs: Sequence[int]) -> Any:
        """Return what came of it."""
        if isinstance(work, Profile):
            return self._profile(work)
        if isinstance(work, Passes):
            return self._passes(work)
        if isinstance(work, Train) and work.by_torch:
            return self._train_by_torch(work, number)
        channels = GlooChannels(self._port, socs, socs, number, _PATIENCE_S)
        try:
            channels.join()
            if isinstance(work, Train):
                return self._train(work, channels)
            if isinstance(work, Federated):
                return self._federated(work, channels, socs)
            assert isinstance(work, Transfers)
            return self._transfers(work, channels, socs)
        finally:
            channels.close()

    def _profile(self, work: Profile) -> Profiled:
        """Measure in seconds of the processor, since a quota lets a layer pass or halts it, and tell what it gets."""
        module = build_model()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        measured = measure_layers(module, SHAPE, work.batches, repeats=work.repeats, chain=read(module).chain,
                                  clock=time.process_time)
        session = TRAINER.start(module, SPAN)
        batch = self._data.batch(torch.arange(1))
        session.gradients([batch], 1)
        session.apply()
        update_s = time.process_time()
        for _ in range(_UPDATES):
            session.apply()
        update_s = (time.process_time() - update_s) / _UPDATES
        cores = (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)
        return Profiled(forward_s=measured.forward_s / cores, backward_s=measured.backward_s / cores,
                        update_s=update_s / cores, cores=cores)

    def _train(self, work: Train, channels: GlooChannels) -> Trained:
        module = build_wide_model() if work.wide else build_model()
        member = Member(work.plan, self._soc, read(module), module, TRAINER, SPAN, data=self._data, send=channels.send,
                        coding=work.coding)
        began_s, ends_s, cpu_s = time.monotonic(), [], time.process_time()
        for mini in minis(work.num_updates, work.plan.num_samples):
            run_script(member.update(mini), channels)
            ends_s.append(time.monotonic())
        channels.flush()
        sent_bytes, cpu_s = channels.sent_bytes, time.process_time() - cpu_s
        end = run_script(member.finish(), channels)
        channels.flush()
        return Trained(began_s=began_s, ends_s=tuple(ends_s), sent_bytes=sent_bytes, cpu_s=cpu_s,
                       weights={} if end is None else {name: tensor.numpy() for name, tensor in end.weights.items()})

    def _train_by_torch(self, work: Train, number: int) -> Trained:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import Schedule1F1B

        plan = work.plan
        assert isinstance(plan, PipelinePlan)
        rank, size, module = plan.socs.index(self._soc), len(plan.stages), build_model()
        chain, stage = read(module).chain, plan.stages[rank]
        own = chain.module(module, stage.first_layer, stage.last_layer).train()
        with torch.no_grad():
            entering: Any = torch.zeros(plan.micro_batch_size, *SHAPE)
            if rank:
                entering, = chain.module(module, 0, stage.first_layer - 1)(entering)
            leaving = own(entering)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group(
            "gloo", init_method=f"tcp://{self._rack.address(plan.socs[0])}:{_TORCH_PORT + number}", rank=rank,
            world_size=size, timeout=timedelta(seconds=_PATIENCE_S))
        schedule = Schedule1F1B(PipelineStage(
            own, rank, size, torch.device("cpu"), input_args=entering.requires_grad_(rank > 0),
            output_args=leaving if rank == size - 1 else tuple(each.requires_grad_() for each in leaving)),
            plan.num_micro_batches, loss_fn=functional.cross_entropy)
        session = TRAINER.start(own, SPAN)
        dist.barrier()
        began_s, ends_s = time.monotonic(), []
        for mini in minis(work.num_updates, plan.num_samples):
            session.begin()
            inputs, labels = self._data.batch(torch.from_numpy(mini.indices))
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
        return Trained(began_s=began_s, ends_s=tuple(ends_s),
                       weights={name: tensor.numpy() for name, tensor in own.state_dict().items()})

    def _federated(self, work: Federated, channels: GlooChannels, socs: Sequence[int]) -> Trained:
        module, own = build_model(), work.samples[self._soc]
        session = TRAINER.start(module, SPAN)
        weights = list(module.parameters())
        rng = np.random.default_rng(self._soc)
        began_s, ends_s = time.monotonic(), []
        for _ in range(work.num_rounds):
            for first in range(0, own, work.batch_size):
                size = min(work.batch_size, own - first)
                session.gradients([self._data.batch(torch.from_numpy(rng.integers(0, len(self._data), size)))], size)
                session.apply()
            share = own / sum(work.samples)
            mean = torch.cat([weight.detach().flatten() for weight in weights]) * share
            channels.all_reduce(Reduce(tuple(socs), mean))
            with torch.no_grad():
                for weight, part in zip(weights, mean.split([weight.numel() for weight in weights]), strict=True):
                    weight.copy_(part.view_as(weight))
            ends_s.append(time.monotonic())
        channels.flush()
        sent_bytes = channels.sent_bytes
        self._meet(channels, socs)
        return Trained(began_s=began_s, ends_s=tuple(ends_s), sent_bytes=sent_bytes,
                       weights={name: tensor.numpy() for name, tensor in module.state_dict().items()})

    def _passes(self, work: Passes) -> Trained:
        """Run the passes of a stage on what could have come."""
        module = build_wide_model()
        layers = read(module)
        index = next(number for number, each in enumerate(work.plan.stages) if self._soc in each.devices)
        member = Member(work.plan, self._soc, layers, module, TRAINER, SPAN, data=self._data,
                        send=lambda *_: None)
        stage, own = work.plan.stages[index], member.work
        assert own is not None
        began_s = time.monotonic()
        for mini in minis(work.num_updates, work.plan.num_samples):
            batches = micro_batches(work.plan, len(mini.indices))
            kept = {}
            for operation in operations(work.plan.policy, stage.in_flight, len(batches)):
                batch = batches[operation.micro_batch]
                first, stop = batch.interval(index, 0)
                inputs, labels = self._data.batch(torch.from_numpy(mini.indices[batch.first:batch.first + batch.size]))
                if operation.kind == Pass.FORWARD:
                    entering = (inputs,) if index == 0 else [
                        torch.zeros(stop - first, *one.shape) for one in own.entering]
                    kept[batch.number] = own.forward(batch.number, entering, stream=0,
                                                     labels=labels if own.loss is not None else None)
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
        """Wait until all are here, so that nobody leaves while another one may still read."""
        channels.all_reduce(Reduce(tuple(socs), torch.zeros(len(socs))))
        channels.flush()
