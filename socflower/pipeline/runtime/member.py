"""One device of a plan in an update: passes in the plan's order, messages, sums of gradients, a step.

A member is written as scripts: generators that yield the messages and sums that they wait for. One process can run all
members in turn (`together.py`), and a process of a cluster its own member over real links (`channels.py`). Both compute
the same bits.
"""

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, form_of, labelled
from socflower.model_graph.graph import arguments_of
from socflower.model_graph.torch_device import device_label
from socflower.pipeline.plan import (
    PipelinePlan,
    Plan,
    Stage,
    SynchronisedPart,
    intervals,
    places,
    synchronised_parts,
)
from socflower.pipeline.profiler.int8_parts import int8_part
from socflower.pipeline.profiler.layers import ReadModel
from socflower.pipeline.runtime.messages import (
    ACTIVATIONS,
    END,
    FREE_ACTIVATIONS,
    FREE_GRADIENTS,
    GRADIENTS,
    LABELS,
    SAMPLES,
    Expect,
    Receive,
    Reduce,
    Script,
    Send,
)
from socflower.pipeline.runtime.micro_batches import (
    MicroBatch,
    micro_batches,
    samples_by_pipeline,
)
from socflower.pipeline.runtime.payloads import (
    EXACT,
    ActivationCoding,
    CutTensors,
    Payloads,
    joined,
)
from socflower.pipeline.runtime.stage import Crossing, Int8Passes, StageWork
from socflower.pipeline.runtime.trained_model import (
    StageEnd,
    TrainedModel,
    assembled,
)
from socflower.pipeline.schedule.order import Pass, ScheduledPass, operations
from socflower.training.exchange.buckets import GradientBucket, make_bucket
from socflower.training.fp32 import FP32Trainer
from socflower.training.hang_watch import working
from socflower.training.saved_values import from_bytes, to_bytes
from socflower.training.session import PARAMETERS
from socflower.training.trainer import TrainingSpan, training_device
from socflower.wire.arrays import pack_arrays, unpack_arrays
from socflower.workloads.data_source import DataSource

OnPass: TypeAlias = Callable[[int, ScheduledPass], None]
"""Called by a member before each pass, with its SoC."""

_OF_WHOLE_MODELS = (
    "train_step",
    "max_grad_norm",
    "reduction",
    "accumulation_steps",
    "autocast",
    "channels_last",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mini:
    """A mini-batch: the samples of one update of the weights."""

    # Counted from the start of training.
    step: int
    # Indices into the data.
    indices: NDArray[np.int64]
    # Key of the random numbers in samples.
    key: tuple[int, ...] = ()


def refuse_unfit(trainer: FP32Trainer) -> None:
    """Raise `ConfigError` for options of a trainer that need the whole model on one device.

    `loss_weight` is called with ((), labels), since the last stage has no inputs.
    """
    for option in fields(FP32Trainer):
        value = getattr(trainer, option.name)
        if option.name in _OF_WHOLE_MODELS and value != option.default:
            raise ConfigError(
                f"FP32Trainer: {option.name} = {value!r} is for groups; leave it out for a pipeline"
            )


class Member:
    """One device of a plan. `module` is its own copy of the model; it trains only its stage.

    `send` carries messages. `budget_bytes` bounds the memory of the stage. `on_pass` is called before each pass.
    `leader` gets the model at the end; the default is the plan's first device. A SoC without a stage is a member too if
    it has the samples or leads.

    On one of `int8_socs` the stage computes in int8, on the CPU. At the beginning of an update its weights are rounded
    at random from the module's. The random numbers depend on the update and the stage's first layer, so they are equal
    on all devices of a stage.
    """

    def __init__(
        self,
        plan: Plan,
        soc: int,
        read: ReadModel,
        module: nn.Module,
        trainer: FP32Trainer,
        span: TrainingSpan,
        *,
        data: DataSource | None,
        send: Send,
        state: bytes | None = None,
        coding: ActivationCoding = EXACT,
        budget_bytes: float = math.inf,
        on_pass: OnPass | None = None,
        leader: int | None = None,
        int8_socs: Collection[int] = (),
    ) -> None:
        refuse_unfit(trainer)
        self.soc, self._plan, self._send = soc, plan, send
        self._leader = plan.socs[0] if leader is None else leader
        self._source = _SampleSource(soc, read, data, send)
        self.stage: StageMember | None = None
        if soc in plan.socs:
            self.stage = StageMember(
                plan,
                soc,
                read,
                module,
                trainer,
                span,
                source=self._source,
                state=state,
                coding=coding,
                budget_bytes=budget_bytes,
                on_pass=on_pass,
                in_int8=soc in int8_socs,
            )

    def update(self, mini: Mini) -> Script[None]:
        """Do one update of the weights."""
        sizes = samples_by_pipeline(self._plan, len(mini.indices))
        parts = [
            replace(mini, indices=mini.indices[first:stop]) for first, stop in intervals(sizes)
        ]
        for pipeline, part in zip(self._plan.pipelines, parts, strict=True):
            if pipeline.samples_on == self.soc:
                self._source.supply(pipeline, part)
        if self.stage is not None:
            yield from self.stage.update(parts[self.stage.place.pipeline], len(mini.indices))

    def update_shares(self, plan: Plan) -> None:
        """Continue with a plan that differs only in shares, between two updates."""
        self._plan = plan
        if self.stage is not None:
            self.stage.plan = plan

    def finish(self) -> Script[TrainedModel | None]:
        """Collect the stages on the leader, which returns the model; the other members return None."""
        own = None if self.stage is None else self.stage.ending()
        if self.soc != self._leader:
            if own is not None:
                self._send(self._leader, END, bytearray().join(pack_arrays(own)))
            return None
        ends = {} if own is None else {self.soc: own}
        for soc in self._plan.socs:
            if soc != self.soc:
                body = yield Receive(soc, END)
                arrays = unpack_arrays(memoryview(body))
                ends[soc] = {name: array.copy() for name, array in arrays.items()}
        return assembled(ends)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of the stage's trained parameters and buffers, and of its optimiser's named state.

        They are those after the last complete update, also in the middle of the next one.
        """
        return ({}, {}) if self.stage is None else self.stage.snapshot()


class _SampleSource:
    """Reads samples for this device, and sends those of other devices."""

    def __init__(self, soc: int, read: ReadModel, data: DataSource | None, send: Send) -> None:
        self._soc, self._model, self._data, self.send = soc, read, data, send

    def get(
        self,
        lane: str,
        pipeline: PipelinePlan,
        mini: Mini,
        batch: MicroBatch,
        rows: slice,
    ) -> Script[tuple[Any, ...]]:
        """Return the model's inputs (lane `SAMPLES`) or the labels, from the device that has them."""
        source = pipeline.samples_on
        if source is None or source == self._soc:
            found = self._read(lane, mini, batch, rows)
        else:
            body = yield Receive(source, lane)
            arrays = unpack_arrays(memoryview(body))
            found = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return tuple(found.values()) if lane == LABELS else self._arguments(found)

    def supply(self, pipeline: PipelinePlan, mini: Mini) -> None:
        """Send the other devices of a pipeline their samples and labels of a mini-batch."""
        last = len(pipeline.stages) - 1
        for batch in micro_batches(pipeline, len(mini.indices)):
            for index, lane in ((0, SAMPLES), (last, LABELS)):
                for rank, soc in enumerate(pipeline.stages[index].devices):
                    rows = batch.rows(index, rank)
                    if soc != self._soc and rows.start < rows.stop:
                        found = self._read(lane, mini, batch, rows)
                        arrays = {
                            name: tensor.contiguous().numpy() for name, tensor in found.items()
                        }
                        self.send(soc, lane, bytearray().join(pack_arrays(arrays)))

    def _arguments(self, inputs: Batch) -> tuple[Any, ...]:
        return arguments_of(self._model.chain.graph, inputs)

    def _read(self, lane: str, mini: Mini, batch: MicroBatch, rows: slice) -> dict[str, Tensor]:
        """Return inputs by the model's names of them, or the labels, of some samples of a micro-batch."""
        if self._data is None:
            raise ConfigError(
                f"pipeline: SoC {self._soc} has no data; give it some, or set samples_on"
            )
        whole = rows
        if self._model.model.free_lengths:
            # All devices of a stage must pad a micro-batch to one length.
            whole = slice(batch.first, batch.first + batch.size)
        with working("reading samples"):
            own = self._data.batch(torch.from_numpy(mini.indices[whole]), mini.key)
        inputs, labels = labelled(own, "pipeline")
        if lane == LABELS:
            found = {LABELS: labels}
            if not isinstance(labels, Tensor):
                raise ConfigError(f"pipeline: labels must be a tensor, and are {form_of(labels)}")
        else:
            names = [str(one.node.target) for one in self._model.chain.graph.inputs]
            given = zip(names, self._arguments(inputs), strict=True)
            found = {name: one for name, one in given if isinstance(one, Tensor)}
        first = rows.start - whole.start
        last = first + rows.stop - rows.start
        return {name: tensor[first:last] for name, tensor in found.items()}


class StageMember:
    """A device that trains a stage; see `Member`."""

    def __init__(
        self,
        plan: Plan,
        soc: int,
        read: ReadModel,
        module: nn.Module,
        trainer: FP32Trainer,
        span: TrainingSpan,
        *,
        source: _SampleSource,
        state: bytes | None,
        coding: ActivationCoding,
        budget_bytes: float,
        on_pass: OnPass | None,
        in_int8: bool,
    ) -> None:
        if in_int8:
            # The integer kernels run on the CPU.
            trainer = replace(trainer, device="cpu")
        self.soc, self.plan, self.place = soc, plan, places(plan)[soc]
        self._read, self._trainer, self._source = read, trainer, source
        self._on_pass = on_pass
        module.train()
        own = read.stage(module, *self._stage.layers).train().to(training_device(trainer))
        self._named = read.named(own)
        restored = None if state is None else from_bytes(state)
        self.work = self._make_work(module, own, span, restored, budget_bytes, in_int8=in_int8)
        self._session = self.work.session
        free = read.model.free_lengths
        self._cut = CutTensors(
            self.place.stage, self.work.entering, self.work.leaving, coding, free=free
        )
        self._lanes = {
            Pass.FORWARD: FREE_ACTIVATIONS if free else ACTIVATIONS,
            Pass.BACKWARD: FREE_GRADIENTS if free else GRADIENTS,
        }
        self._buckets = self._make_buckets()
        self._losses: list[Tensor] = []
        self._num_samples = 0
        # Of the present mini-batch: labels by micro-batch, and the sum of all samples' weights in the loss.
        self._labels: dict[int, Tensor] = {}
        self._weight = 0.0
        # Seconds of passes and their samples since the last `drain_sample_s`.
        self._busy_s, self._busy_samples = 0.0, 0
        self._copy_buffers()
        self._count_state()

    @property
    def _pipeline(self) -> PipelinePlan:
        return self.plan.pipelines[self.place.pipeline]

    @property
    def _stage(self) -> Stage:
        return self._pipeline.stages[self.place.stage]

    @property
    def share(self) -> int:
        """This device's samples of a micro-batch."""
        return self._stage.shares[self.place.rank]

    def _make_work(
        self,
        module: nn.Module,
        own: nn.Module,
        span: TrainingSpan,
        state: Mapping[str, Any] | None,
        budget_bytes: float,
        *,
        in_int8: bool,
    ) -> StageWork:
        stage, chain = self._stage, self._read.chain
        pieces = chain.pieces[stage.first_layer : stage.last_layer + 1]
        is_last = stage.last_layer == self._read.model.num_layers - 1
        draws = any(operation.draws for piece in pieces for operation in piece.operations)
        seed, int8 = _seed_of(span.seed), None
        if in_int8:
            layers = int8_part(module, chain, *stage.layers).layers(
                seed=seed,
                input_gradient=self.place.stage > 0,
                num_passes=stage.in_flight,
            )
            int8 = Int8Passes(layers, own, stage.in_flight)
        return StageWork(
            name=f"stage {self.place.stage} on SoC {self.soc}",
            module=own,
            entering=tuple(map(Crossing.of, pieces[0].entering)),
            leaving=() if is_last else tuple(map(Crossing.of, pieces[-1].leaving)),
            limit=stage.in_flight,
            device=training_device(self._trainer),
            budget_bytes=budget_bytes,
            int8=int8,
            loss=self._trainer.loss if is_last else None,
            start=lambda run: self._trainer.session(
                run, own, span, state, seed=seed if draws else None, named=self._named
            ),
        )

    def _make_buckets(self) -> list[tuple[SynchronisedPart, GradientBucket]]:
        """Return the gradients that this device exchanges: last layers first, in one order on all devices."""
        found = []
        for part in reversed(synchronised_parts(self.plan, self._read.model.ties)):
            if self.soc not in part.devices or len(part.devices) == 1:
                continue
            names = self._read.part_names(part)
            # A tied parameter may come at another place of another stage.
            weights = [
                weight
                for name, weight in (sorted if part.tie else list)(self._named.items())
                if name in names and weight.requires_grad
            ]
            if len({weight.dtype for weight in weights}) > 1:
                raise ConfigError(
                    f"pipeline: layers {part.first_layer} to {part.last_layer} have several types of weights"
                )
            if weights:
                found.append((part, make_bucket(weights[::-1])))
        return found

    # ------------------------------------------------------------------------------------------------- an update

    def update(self, mini: Mini, batch_size: int) -> Script[None]:
        """Do one update with the pipeline's samples `mini` of a mini-batch of `batch_size`."""
        batches = micro_batches(self._pipeline, len(mini.indices))
        self._begin(mini.step)
        if self.work.loss is not None:
            yield from self._read_labels(batches, mini, batch_size)
        order = list(operations(self._pipeline.policy, self._stage.in_flight, len(batches)))
        coming = []
        for operation in order:
            coming += self._messages(operation.kind, batches[operation.micro_batch])
        yield Expect(tuple(coming))
        for operation in order:
            batch = batches[operation.micro_batch]
            if not len(mini.indices[self._rows(batch)]):
                continue
            if self._on_pass is not None:
                self._on_pass(self.soc, operation)
            if operation.kind == Pass.FORWARD:
                yield from self._forward(batch, mini)
            else:
                yield from self._backward(batch)
        yield from self._sum_gradients()
        self._session.step()
        self._count_state()
        self._copy_buffers()

    def _begin(self, step: int) -> None:
        self._session.begin()
        if self.work.int8 is not None:
            draw = step * self._read.model.num_layers + self._stage.first_layer
            self.work.int8.round_masters(draw)
        if self.work.loss is not None:
            self._losses.append(torch.zeros((), device=self.work.device))

    def _read_labels(
        self, batches: Sequence[MicroBatch], mini: Mini, batch_size: int
    ) -> Script[None]:
        """Read this device's labels of a mini-batch, and sum their weights over all devices with a loss."""
        self._labels.clear()
        for batch in batches:
            rows = self._rows(batch)
            if rows.start < rows.stop:
                (labels,) = yield from self._source.get(LABELS, self._pipeline, mini, batch, rows)
                self._labels[batch.number] = labels
        self._weight = float(batch_size)
        weights = self._trainer.loss_weights
        if weights.is_read:
            own = sum(weights.of(((), labels)) for labels in self._labels.values())
            total = torch.tensor([own], dtype=torch.float64)
            last_stages = [pipeline.stages[-1] for pipeline in self.plan.pipelines]
            devices = tuple(soc for stage in last_stages for soc in stage.devices)
            if len(devices) > 1:
                yield Reduce(devices, total)
            self._weight = float(total)

    def _forward(self, batch: MicroBatch, mini: Mini) -> Script[None]:
        rows = self._rows(batch)
        entering: tuple[Tensor, ...]
        if self.place.stage == 0:
            entering = yield from self._source.get(SAMPLES, self._pipeline, mini, batch, rows)
        else:
            entering = joined((yield from self._receive(Pass.FORWARD, batch, self._cut.inputs)))
        labels, share = None, 1.0
        if self.work.loss is not None:
            labels = self._labels.pop(batch.number)
            weights = self._trainer.loss_weights
            share = weights.share(weights.of(((), labels)), self._weight)
            labels = labels.to(self.work.device)
        with self._timed():
            made = self.work.forward(
                batch.number,
                entering,
                stream=self._stream(mini.step, rows.start),
                labels=labels,
                weight=share,
            )
        self._busy_samples += rows.stop - rows.start
        self._num_samples += rows.stop - rows.start
        if self.work.loss is not None:
            self._losses[-1] += made[0]
            return
        self._require_planned(entering, made)
        self._send_activations(batch, made)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time of a pass, which waits for no other device."""
        started_s = time.perf_counter()
        with working("a stage's pass"):
            yield
        self._busy_s += time.perf_counter() - started_s

    def _send_activations(self, batch: MicroBatch, made: Sequence[Tensor]) -> None:
        first, _ = batch.interval(self.place.stage, self.place.rank)
        following = self._pipeline.stages[self.place.stage + 1]
        for piece in batch.slices(self.place.stage):
            if piece.sender == self.place.rank:
                begin, end = piece.first - first, piece.stop - first
                body = self._cut.outputs.encode(made, begin, end)
                sent = [tensor[begin:end] for tensor in made]
                self._cut.keep_errors(batch.number, piece, sent, body)
                lane = self._lanes[Pass.FORWARD]
                self._source.send(following.devices[piece.receiver], lane, body)

    def _require_planned(self, entering: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Raise `ConfigError` for activations of another shape than planned; the next stage would misread them."""
        if self._read.model.free_lengths:
            return
        for tensor, planned in zip(made, self.work.leaving, strict=True):
            shape = tuple(tensor.shape[1:])
            if shape != planned.shape:
                raise self._other_shape(tuple(entering[0].shape[1:]), shape, planned.shape)

    def _other_shape(
        self, entered: tuple[int, ...], made: tuple[int, ...], planned: tuple[int, ...]
    ) -> ConfigError:
        what, model = "activations" if self.place.stage else "samples", self._read.model
        return ConfigError(
            f"pipeline: {what} of shape {entered} make activations of shape {made} behind layer "
            f"{self._stage.last_layer} of {model.name}; planned samples of shape {model.sample_shape} make "
            f"{planned}; pad or crop all samples to one shape, or use exported_module(..., free=...)"
        )

    def _backward(self, batch: MicroBatch) -> Script[None]:
        gradients: list[Tensor | None] = []
        if self.work.loss is None:
            pieces = yield from self._receive(Pass.BACKWARD, batch, self._cut.output_gradients)
            own = [
                piece for piece in batch.slices(self.place.stage) if piece.sender == self.place.rank
            ]
            corrected = [
                self._cut.corrected(batch.number, piece, gradient)
                for piece, gradient in zip(own, pieces, strict=False)
            ]
            arrived = iter(joined(corrected) if corrected else ())
            gradients = [next(arrived) if one.has_gradient else None for one in self.work.leaving]
        with self._timed():
            returned = self.work.backward(batch.number, gradients)
        entered = [gradient for gradient in returned if gradient is not None]
        if self.place.stage and entered:
            first, _ = batch.interval(self.place.stage, self.place.rank)
            before = self._pipeline.stages[self.place.stage - 1]
            for piece in batch.slices(self.place.stage - 1):
                if piece.receiver == self.place.rank:
                    begin, end = piece.first - first, piece.stop - first
                    body = self._cut.input_gradients.encode(entered, begin, end)
                    lane = self._lanes[Pass.BACKWARD]
                    self._source.send(before.devices[piece.sender], lane, body)

    def _sum_gradients(self) -> Script[None]:
        for part, bucket in self._buckets:
            bucket.clear()
            for position in range(len(bucket.parameters)):
                bucket.store_gradient(position)
            bucket.to_host()
            yield Reduce(part.devices, bucket.buffer)
            bucket.from_host()

    def _rows(self, batch: MicroBatch) -> slice:
        """Return this device's samples of a micro-batch, in its pipeline's samples of the mini-batch."""
        return batch.rows(self.place.stage, self.place.rank)

    def _arriving(self, kind: Pass, batch: MicroBatch) -> list[tuple[int, int]]:
        """Return (sender, number of samples) of the messages for a pass over a micro-batch."""
        index, rank, stages = self.place.stage, self.place.rank, self._pipeline.stages
        if kind == Pass.FORWARD:
            return [
                (stages[index - 1].devices[piece.sender], piece.num_samples)
                for piece in (batch.slices(index - 1) if index else ())
                if piece.receiver == rank
            ]
        return [
            (stages[index + 1].devices[piece.receiver], piece.num_samples)
            for piece in (batch.slices(index) if self.work.loss is None else ())
            if piece.sender == rank
        ]

    def _messages(self, kind: Pass, batch: MicroBatch) -> list[Receive]:
        payloads = self._cut.inputs if kind == Pass.FORWARD else self._cut.output_gradients
        arriving = [
            (soc, payloads.num_bytes(num_samples))
            for soc, num_samples in self._arriving(kind, batch)
        ]
        lane = self._lanes[kind]
        return [Receive(soc, lane, num_bytes) for soc, num_bytes in arriving if num_bytes != 0]

    def _receive(
        self, kind: Pass, batch: MicroBatch, payloads: Payloads
    ) -> Script[list[tuple[Tensor, ...]]]:
        pieces = []
        arriving = self._arriving(kind, batch)
        for request, (_, num_samples) in zip(self._messages(kind, batch), arriving, strict=False):
            body = yield request
            pieces.append(payloads.decode(body, num_samples))
        return pieces

    def _stream(self, step: int, first: int) -> int:
        """Return a different number for each pass of a training, from its update, pipeline and first sample."""
        update = step * len(self.plan.pipelines) + self.place.pipeline
        return update * self._pipeline.num_samples + first

    # ---------------------------------------------------------------------------------------------------- its state

    def drain_sample_s(self) -> float:
        """Return the seconds of both passes of a sample since the last call, without waits; 0 without samples."""
        busy_s, samples, self._busy_s, self._busy_samples = self._busy_s, self._busy_samples, 0.0, 0
        return busy_s / samples if samples else 0.0

    def _buffers(self) -> dict[str, Tensor]:
        """Return the stage's persistent buffers on the CPU, by their names in the model."""
        return {
            name: entry.cpu()
            for name, entry in self.work.module.state_dict(keep_vars=True).items()
            if not isinstance(entry, nn.Parameter)
        }

    def _copy_buffers(self) -> None:
        """Copy the buffers, which passes of the next update change before it is complete."""
        self._buffers_before = {name: buffer.clone() for name, buffer in self._buffers().items()}

    def _count_state(self) -> None:
        held = 0.0
        for parameter in self.work.module.parameters():
            # A gradient needs as much memory.
            held += parameter.nbytes * (2 if parameter.requires_grad else 1)
        if self.work.int8 is not None:
            held += self.work.int8.layers.weight_bytes
        self.work.state_bytes = held + self._session.state_bytes

    def _trained(self) -> dict[str, Tensor]:
        return {
            name: weight.detach().cpu()
            for name, weight in self._named.items()
            if weight.requires_grad
        }

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of weights, buffers and optimiser state; see `Member.snapshot`."""
        weights = {name: weight.clone() for name, weight in self._trained().items()}
        return weights | self._buffers_before, copy.deepcopy(self._session.state())

    def ending(self) -> StageEnd:
        """Return the stage for the leader: buffers, and the weights that no device before it has."""
        state, first_of = self._session.state(), frozenset[str]()
        for part in synchronised_parts(self.plan, self._read.model.ties):
            if part.devices[0] == self.soc:
                first_of |= self._read.part_names(part)
        own = {key: one for key, one in state.get(PARAMETERS, {}).items() if key in first_of}
        losses = torch.stack(self._losses).double().cpu().numpy() if self._losses else np.zeros(0)
        measured = [self.work.peak_bytes, self.work.peak_in_flight, self.drain_sample_s()]
        ending: dict[str, NDArray[Any]] = {
            "samples": np.array([self._num_samples], np.int64),
            "losses": losses,
            "state": np.frombuffer(to_bytes({**state, PARAMETERS: own}), np.uint8),
            "device": np.frombuffer(self._label().encode(), np.uint8),
            "measured": np.array(measured),
        }
        for name, weight in self._trained().items():
            if name in first_of:
                ending[f"weight/{name}"] = weight.contiguous().numpy()
        for name, buffer in self._buffers().items():
            ending[f"buffer/{name}"] = buffer.contiguous().numpy()
        return ending

    def _label(self) -> str:
        label = device_label(self.work.device)
        if self.work.int8 is None:
            return label
        return f"{label}, int8 {self.work.int8.layers.engine.engine.kernel}"


def _seed_of(key: Sequence[int]) -> int:
    return int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))
