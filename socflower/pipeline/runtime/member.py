"""What one device of a plan does in an update: passes in the plan's order, messages, sums of gradients, a step.

A member is written as scripts, generators that yield what they wait for, so that one process can run all members in
turn (`together.py`) and a process of a cluster its own one over real links (`channels.py`). Both compute the same bits.
"""

import copy
import io
import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import pair_of
from socflower.model_graph.torch_device import device_label
from socflower.pipeline.plan import PipelinePlan, Plan, SynchronisedPart, synchronised_parts
from socflower.pipeline.profiler.int8_parts import int8_part
from socflower.pipeline.profiler.layers import ReadModel
from socflower.pipeline.runtime.micro_batches import (
    MicroBatch,
    micro_batches,
    offsets,
    samples_by_pipeline,
)
from socflower.pipeline.runtime.payloads import (
    EXACT,
    ActivationCoding,
    CutFeedback,
    Payloads,
    joined,
)
from socflower.pipeline.runtime.stage import Crossing, Int8Passes, StageWork
from socflower.pipeline.schedule.order import Pass, ScheduledPass, operations
from socflower.training.fp32 import FP32Session, FP32Trainer
from socflower.training.sum_order import GradientBucket, make_bucket
from socflower.training.trainer import TrainingSpan, training_device
from socflower.wire.arrays import pack_arrays, unpack_arrays
from socflower.workloads import DataSource

_Result = TypeVar("_Result")

ACTIVATIONS, GRADIENTS, SAMPLES, LABELS, RING, END = (
    "activations",
    "gradients",
    "samples",
    "labels",
    "ring",
    "end",
)
STATE, CONTROL = (
    "state",
    "control",
)  # of stages that are moved or backed up, and what members agree on
LANES = (ACTIVATIONS, GRADIENTS, SAMPLES, LABELS, RING, END, STATE, CONTROL)
"""What messages between two devices are about; those of one lane arrive in the order of sending."""


class Receive(NamedTuple):
    """A script waits for the next message of a lane, which is answered with its bytes."""

    source: int
    lane: str
    num_bytes: int | None = None  # None: as many as were sent


class Reduce(NamedTuple):
    """A script waits for the sum of a buffer over some devices, in place, in the order of a ring of them."""

    devices: tuple[int, ...]
    buffer: Tensor  # on the CPU, one dimension


class Expect(NamedTuple):
    """A script says which messages of lanes with known sizes it will wait for, so that links can fetch them ahead."""

    messages: tuple[Receive, ...]  # of each lane in the order of their coming


Script: TypeAlias = Generator[Receive | Reduce | Expect, Any, _Result]
Send: TypeAlias = Callable[[int, str, bytearray], None]
"""Takes the receiving SoC, the lane and the bytes; returns at once."""

OnPass: TypeAlias = Callable[[int, ScheduledPass], None]
"""Called by a member before each pass, with its SoC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mini:
    """A mini-batch: the samples of one update of the weights."""

    step: int  # counted from the start of training
    indices: NDArray[np.int64]  # into the data
    key: tuple[int, ...] = ()  # of the random numbers in samples


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """What the leader has at the end: the whole model of all stages."""

    weights: Mapping[str, Tensor]  # trained parameters and buffers, by their names in the model
    state: bytes  # of optimisers and schedules, to continue from, under any plan
    losses: tuple[float, ...]  # of each update, the mean over its samples
    peak_bytes: Mapping[int, float]  # by SoC
    peak_in_flight: Mapping[int, int]
    sample_s: Mapping[
        int, float
    ]  # seconds of both passes of a sample, without waits; 0: it had none
    devices: Mapping[int, str]  # that trained, such as "cpu"

    def to_bytes(self) -> bytes:
        """Return all of it, to be read by `from_bytes`."""
        stream = io.BytesIO()
        torch.save({key.name: getattr(self, key.name) for key in fields(self)}, stream)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, body: bytes | memoryview) -> "TrainedModel":
        """Return what `to_bytes` wrote."""
        return cls(**torch.load(io.BytesIO(body), weights_only=True, map_location="cpu"))


def refuse_unfit(trainer: FP32Trainer) -> None:
    """Raise `ConfigError` for a trainer that needs the whole model at once."""
    for key, why in (
        ("train_step", "computes the loss of a whole model"),
        ("loss_weight", "reads whole batches"),
        ("max_grad_norm", "limits the norm of a whole model's gradient"),
    ):
        if getattr(trainer, key) is not None:
            raise ConfigError(
                f"FP32Trainer: {key} {why}, and a pipeline has no device with one; leave it out"
            )
    if trainer.reduction != "auto":
        raise ConfigError(
            f"FP32Trainer: reduction = {trainer.reduction!r} is for groups, and a pipeline sums a "
            "stage's gradients by its plan; leave it out"
        )
    if trainer.accumulation_steps > 1:
        raise ConfigError(
            "FP32Trainer: accumulation_steps, but a pipeline accumulates its micro-batches; leave it out "
            "and give num_micro_batches"
        )
    if trainer.autocast is not None or trainer.channels_last:
        raise ConfigError(
            "FP32Trainer: autocast and channels_last change tensors that cross cuts, which pipelines "
            "send as the model makes them; leave them out"
        )


class Member:
    """One device of a plan. `module` is a model of its own, of which only its stage is trained.

    `budget_bytes` bounds the memory of the stage, `send` carries messages, `on_pass` is called before each pass.
    `leader` gets the model at the end, by default the plan's first device. A SoC that has the samples, or leads, and
    has no stage takes part as well.

    On one of `int8_socs` the stage computes in int8, on the CPU. At the beginning of an update its weights are rounded
    at random from the module's, by random numbers of the update and its first layer: equal on all of a stage's devices.
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
        if soc in int8_socs:
            trainer = replace(trainer, device="cpu")  # where the integer kernels run
        if read.model.num_layers != plan.pipelines[0].num_layers:
            raise ConfigError(
                f"pipeline: the plan is of {plan.pipelines[0].num_layers} layers and model "
                f"{read.model.name} has {read.model.num_layers}; plan this model anew"
            )
        self.soc, self._plan, self._read, self._data, self._send = soc, plan, read, data, send
        self._trainer, self._coding, self._on_pass = trainer, coding, on_pass
        self._leader = plan.socs[0] if leader is None else leader
        self._losses: list[Tensor] = []
        self._labels: dict[int, Tensor] = {}  # of the present mini-batch, by micro-batch
        self._weight = 0.0  # of the present mini-batch
        self._num_samples = 0
        self._busy_s, self._busy_samples = 0.0, 0  # since the last look
        place = next(
            (
                (number, index, rank)
                for number, pipeline in enumerate(plan.pipelines)
                for index, stage in enumerate(pipeline.stages)
                for rank, member in enumerate(stage.devices)
                if member == soc
            ),
            None,
        )
        self.work: StageWork | None = None
        if place is not None:
            self._number, self._index, self._rank = place
            self._pipeline: PipelinePlan = plan.pipelines[self._number]
            self._stage = self._pipeline.stages[self._index]
            self._prepare(module, span, state, budget_bytes, in_int8=soc in int8_socs)

    def _prepare(
        self,
        module: nn.Module,
        span: TrainingSpan,
        state: bytes | None,
        budget_bytes: float,
        *,
        in_int8: bool,
    ) -> None:
        stage, chain = self._stage, self._read.chain
        first, last = chain.pieces[stage.first_layer], chain.pieces[stage.last_layer]
        own = self._read.stage(module, stage.first_layer, stage.last_layer)
        if not module.training:
            module.train()
        own.train(module.training)
        self._module = own
        is_last = stage.last_layer == self._read.model.num_layers - 1
        entering = tuple(map(Crossing.of, first.entering))
        leaving = () if is_last else tuple(map(Crossing.of, last.leaving))
        draws = any(
            operation.draws
            for piece in chain.pieces[stage.first_layer : stage.last_layer + 1]
            for operation in piece.operations
        )
        device = training_device(self._trainer)
        own.to(device)
        int8 = None
        if in_int8:
            layers = int8_part(module, chain, stage.first_layer, stage.last_layer).layers(
                seed=_seed_of(span.seed), input_gradient=self._index > 0, num_passes=stage.in_flight
            )
            int8 = Int8Passes(layers, own, stage.in_flight)
        self.work = StageWork(
            name=f"stage {self._index} on SoC {self.soc}",
            module=own,
            entering=entering,
            leaving=leaving,
            limit=stage.in_flight,
            device=device,
            budget_bytes=budget_bytes,
            int8=int8,
            seed=_seed_of(span.seed) if draws else None,
            loss=self._trainer.loss if is_last else None,
        )
        what = f"activations into stage {self._index}", f"activations out of stage {self._index}"
        self._inputs = Payloads(entering, self._coding.bits, what=what[0])
        self._outputs = Payloads(leaving, self._coding.bits, what=what[1])
        self._input_gradients = Payloads(
            [one for one in entering if one.has_gradient],
            self._coding.gradient_bits,
            what=f"gradients of {what[0]}",
        )
        self._output_gradients = Payloads(
            [one for one in leaving if one.has_gradient],
            self._coding.gradient_bits,
            what=f"gradients of {what[1]}",
        )
        self._feedback = CutFeedback(self._coding.feedback)
        self._session: FP32Session | None = None
        if any(parameter.requires_grad for parameter in own.parameters()):
            self._session = self._trainer.start(own, span)
            if state is not None:
                self._session.restore_named(
                    torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
                )
        self._buckets = [
            (part, bucket)
            for part in reversed(synchronised_parts(self._plan))
            if self.soc in part.devices
            and len(part.devices) > 1
            and (bucket := self._bucket(part)) is not None
        ]
        self._copy_buffers()
        self._count_state()

    # ------------------------------------------------------------------------------------------------- an update

    def update(self, mini: Mini) -> Script[None]:
        """Do one update of the weights."""
        sizes = samples_by_pipeline(self._plan, len(mini.indices))
        starts = offsets(sizes)
        parts = [
            mini.indices[start : start + size] for start, size in zip(starts, sizes, strict=True)
        ]
        for pipeline, indices in zip(self._plan.pipelines, parts, strict=True):
            if pipeline.samples_on == self.soc:
                self._supply(pipeline, micro_batches(pipeline, len(indices)), indices, mini.key)
        if self.work is None:
            return
        indices = parts[self._number]
        batches = micro_batches(self._pipeline, len(indices))
        self._begin(mini.step)
        if self.work.loss is not None:
            yield from self._read_labels(batches, indices, mini)
        order = tuple(operations(self._pipeline.policy, self._stage.in_flight, len(batches)))
        yield Expect(
            tuple(
                message
                for operation in order
                for message in self._messages(operation.kind, batches[operation.micro_batch])
            )
        )
        for operation in order:
            batch = batches[operation.micro_batch]
            first, stop = batch.interval(self._index, self._rank)
            if first == stop:
                continue
            if self._on_pass is not None:
                self._on_pass(self.soc, operation)
            if operation.kind == Pass.FORWARD:
                yield from self._forward(batch, first, stop, mini, indices)
            else:
                yield from self._backward(batch, first)
        for part, bucket in self._buckets:
            bucket.clear()
            for position in range(len(bucket.parameters)):
                bucket.store_gradient(position)
            bucket.to_host()
            yield Reduce(part.devices, bucket.buffer)
            bucket.from_host()
        if self._session is not None:
            self._session.apply()
            self._count_state()
        self._copy_buffers()

    def _read_labels(
        self,
        batches: Sequence[MicroBatch],
        indices: NDArray[np.int64],
        mini: Mini,
    ) -> Script[None]:
        """Read the labels of this device's part of a mini-batch, and sum their weights over all devices with a loss."""
        weights = self._trainer.loss_weights
        self._labels.clear()
        for batch in batches:
            first, stop = batch.interval(self._index, self._rank)
            if first < stop:
                self._labels[batch.number] = yield from self._samples(
                    LABELS, indices[batch.first + first : batch.first + stop], mini.key
                )
        self._weight = float(len(mini.indices))
        if weights.is_read:
            weight = torch.tensor(
                [sum(weights.of(((), labels)) for labels in self._labels.values())],
                dtype=torch.float64,
            )
            devices = tuple(
                soc for pipeline in self._plan.pipelines for soc in pipeline.stages[-1].devices
            )
            if len(devices) > 1:
                yield Reduce(devices, weight)
            self._weight = float(weight)

    def _copy_buffers(self) -> None:
        """Keep what passes of the next update change before it is complete."""
        self._buffers_before = {name: buffer.clone() for name, buffer in self._buffers().items()}

    def _begin(self, step: int) -> None:
        if self._session is not None:
            self._session.begin()
        assert self.work is not None
        if self.work.int8 is not None:
            self.work.int8.round_masters(
                step * self._read.model.num_layers + self._stage.first_layer
            )
        if self.work.loss is not None:
            self._losses.append(torch.zeros((), device=self.work.device))

    def _forward(
        self,
        batch: MicroBatch,
        first: int,
        stop: int,
        mini: Mini,
        indices: NDArray[np.int64],
    ) -> Script[None]:
        assert self.work is not None
        rows = indices[batch.first + first : batch.first + stop]
        entering: tuple[Tensor, ...]
        if self._index == 0:
            entering = ((yield from self._samples(SAMPLES, rows, mini.key)),)
        else:
            entering = joined((yield from self._receive(Pass.FORWARD, batch, self._inputs)))
        labels, share = None, 1.0
        if self.work.loss is not None:
            labels = self._labels.pop(batch.number)
            weights = self._trainer.loss_weights
            share = weights.share(weights.of(((), labels)), self._weight)
            labels = labels.to(self.work.device)
        started_s = time.perf_counter()
        made = self.work.forward(
            batch.number,
            entering,
            stream=self._stream(mini.step, batch, first),
            labels=labels,
            weight=share,
        )
        self._busy_s += time.perf_counter() - started_s
        self._num_samples += stop - first
        self._busy_samples += stop - first
        if self.work.loss is not None:
            self._losses[-1] += made[0]
            return
        self._require_planned(entering, made)
        following = self._pipeline.stages[self._index + 1]
        for piece in batch.slices(self._index):
            if piece.sender == self._rank:
                begin, end = piece.first - first, piece.stop - first
                body = self._outputs.encode(made, begin, end)
                if self._coding.feedback != "none":
                    self._feedback.keep(
                        batch.number,
                        piece.receiver,
                        [tensor[begin:end] for tensor in made],
                        self._outputs.decode(body, piece.num_samples),
                    )
                self._send(following.devices[piece.receiver], ACTIVATIONS, body)

    def _require_planned(self, entering: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Raise `ConfigError` for activations of another shape than planned, which the next stage would misread."""
        assert self.work is not None
        for tensor, planned in zip(made, self.work.leaving, strict=True):
            shape = tuple(tensor.shape[1:])
            if shape == planned.shape:
                continue
            what = "samples" if self._index == 0 else "activations"
            raise ConfigError(
                f"pipeline: {what} of shape {tuple(entering[0].shape[1:])} make activations of shape {shape} behind "
                f"layer {self._stage.last_layer} of {self._read.model.name}, where samples of shape "
                f"{self._read.model.sample_shape}, which were planned, make {planned.shape}; pad or crop all samples "
                "to one shape, or train in groups"
            )

    def _backward(self, batch: MicroBatch, first: int) -> Script[None]:
        assert self.work is not None
        gradients: list[Tensor | None] = []
        if self.work.loss is None:
            pieces = yield from self._receive(Pass.BACKWARD, batch, self._output_gradients)
            receivers = [
                piece.receiver for piece in batch.slices(self._index) if piece.sender == self._rank
            ]
            numbers = [number for number, one in enumerate(self.work.leaving) if one.has_gradient]
            pieces = [
                self._feedback.correct(batch.number, receiver, piece, numbers)
                for receiver, piece in zip(receivers, pieces, strict=False)
            ]
            arrived = iter(joined(pieces) if pieces else ())
            gradients = [next(arrived) if one.has_gradient else None for one in self.work.leaving]
        started_s = time.perf_counter()
        entered = [
            gradient
            for gradient in self.work.backward(batch.number, gradients)
            if gradient is not None
        ]
        self._busy_s += time.perf_counter() - started_s
        if self._index and entered:
            before = self._pipeline.stages[self._index - 1]
            for piece in batch.slices(self._index - 1):
                if piece.receiver == self._rank:
                    self._send(
                        before.devices[piece.sender],
                        GRADIENTS,
                        self._input_gradients.encode(
                            entered, piece.first - first, piece.stop - first
                        ),
                    )

    def _arriving(self, kind: Pass, batch: MicroBatch) -> list[tuple[int, int]]:
        """Return who sends what this device needs for a pass over a micro-batch, and how many samples each."""
        if kind == Pass.FORWARD:
            return [
                (self._pipeline.stages[self._index - 1].devices[piece.sender], piece.num_samples)
                for piece in (batch.slices(self._index - 1) if self._index else ())
                if piece.receiver == self._rank
            ]
        assert self.work is not None
        return [
            (self._pipeline.stages[self._index + 1].devices[piece.receiver], piece.num_samples)
            for piece in (batch.slices(self._index) if self.work.loss is None else ())
            if piece.sender == self._rank
        ]

    def _messages(self, kind: Pass, batch: MicroBatch) -> list[Receive]:
        lane, payloads = (
            (ACTIVATIONS, self._inputs)
            if kind == Pass.FORWARD
            else (GRADIENTS, self._output_gradients)
        )
        return [
            Receive(soc, lane, num_bytes)
            for soc, num_samples in self._arriving(kind, batch)
            if (num_bytes := payloads.num_bytes(num_samples))
        ]

    def _receive(
        self, kind: Pass, batch: MicroBatch, payloads: Payloads
    ) -> Script[list[tuple[Tensor, ...]]]:
        pieces = []
        for request, (_, num_samples) in zip(
            self._messages(kind, batch), self._arriving(kind, batch), strict=False
        ):
            body = yield request
            pieces.append(payloads.decode(body, num_samples))
        return pieces

    def _stream(self, step: int, batch: MicroBatch, first: int) -> int:
        """Return a number of its own for each pass of a training: of update, pipeline, micro-batch and first sample."""
        return (
            (step * len(self._plan.pipelines) + self._number) * self._pipeline.num_samples
            + batch.first
            + first
        )

    def drain_sample_s(self) -> float:
        """Return the seconds of both passes of a sample since the last call, without waits; 0 without samples."""
        busy_s, samples, self._busy_s, self._busy_samples = self._busy_s, self._busy_samples, 0.0, 0
        return busy_s / samples if samples else 0.0

    def share_anew(self, plan: Plan) -> None:
        """Go on with a plan that differs in shares alone, between two updates."""
        self._plan = plan
        if self.work is not None:
            self._pipeline = plan.pipelines[self._number]
            self._stage = self._pipeline.stages[self._index]

    # ---------------------------------------------------------------------------------------------------- samples

    def _samples(self, lane: str, rows: NDArray[np.int64], key: tuple[int, ...]) -> Script[Tensor]:
        source = self._pipeline.samples_on
        if source is not None and source != self.soc:
            body = yield Receive(source, lane)
            return torch.from_numpy(unpack_arrays(memoryview(body))[lane].copy())
        return self._read_samples(rows, key)[lane == LABELS]

    def _read_samples(self, rows: NDArray[np.int64], key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if self._data is None:
            raise ConfigError(
                f"pipeline: SoC {self.soc} has no data, and the plan lets it read samples; give it some, "
                "or let samples_on name the device that has them"
            )
        return pair_of(self._data.batch(torch.from_numpy(rows), key), "pipeline")

    def _supply(
        self,
        pipeline: PipelinePlan,
        batches: Sequence[MicroBatch],
        indices: NDArray[np.int64],
        key: tuple[int, ...],
    ) -> None:
        """Send the other devices of a pipeline their samples and labels of a mini-batch."""
        last = len(pipeline.stages) - 1
        for batch in batches:
            for index, lane in ((0, SAMPLES), (last, LABELS)):
                for rank, soc in enumerate(pipeline.stages[index].devices):
                    first, stop = batch.interval(index, rank)
                    if soc != self.soc and first < stop:
                        rows = indices[batch.first + first : batch.first + stop]
                        tensor = self._read_samples(rows, key)[lane == LABELS]
                        self._send(
                            soc,
                            lane,
                            bytearray().join(pack_arrays({lane: tensor.contiguous().numpy()})),
                        )

    # -------------------------------------------------------------------------------------------------- gradients

    def _bucket(self, part: SynchronisedPart) -> GradientBucket | None:
        names = self._names(part.first_layer, part.last_layer)
        parameters = [
            parameter
            for name, parameter in self._module.named_parameters()
            if name in names and parameter.requires_grad
        ]
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise ConfigError(
                f"pipeline: layers {part.first_layer} to {part.last_layer} have weights of several "
                "types; cut the model between them"
            )
        return make_bucket(parameters[::-1]) if parameters else None

    def _names(self, first_layer: int, last_layer: int) -> frozenset[str]:
        return frozenset().union(
            *(
                operation.tensors
                for piece in self._read.chain.pieces[first_layer : last_layer + 1]
                for operation in piece.operations
            )
        )

    def _buffers(self) -> dict[str, Tensor]:
        """Return the stage's persistent buffers on the CPU, by their names in the model."""
        return {
            name: entry.cpu()
            for name, entry in self._module.state_dict(keep_vars=True).items()
            if not isinstance(entry, nn.Parameter)
        }

    def _count_state(self) -> None:
        assert self.work is not None
        parameters = list(self._module.parameters())
        held = sum(
            parameter.nbytes * (2 if parameter.requires_grad else 1) for parameter in parameters
        )
        engines = 0 if self.work.int8 is None else self.work.int8.layers.weight_bytes
        self.work.state_bytes = (
            held + engines + (0 if self._session is None else self._session.state_bytes)
        )

    # ---------------------------------------------------------------------------------------------------- the end

    def finish(self) -> Script[TrainedModel | None]:
        """Bring the stages together on the leader, which returns the model; the others return None."""
        if self.soc != self._leader:
            if self.work is not None:
                self._send(self._leader, END, bytearray().join(pack_arrays(self._ending())))
            return None
        ends = {} if self.work is None else {self.soc: self._ending()}
        for soc in self._plan.socs:
            if soc != self.soc:
                body = yield Receive(soc, END)
                ends[soc] = {
                    name: array.copy() for name, array in unpack_arrays(memoryview(body)).items()
                }
        return self._assembled(ends)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of the stage's trained parameters and buffers, and of its optimiser's named state.

        They are those after the last update that is complete, also in the middle of the next one.
        """
        if self.work is None:
            return {}, {}
        weights = {
            name: parameter.detach().cpu().clone()
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }
        optimizer = {} if self._session is None else copy.deepcopy(self._session.named_state())
        return weights | self._buffers_before, optimizer

    def _ending(self) -> dict[str, NDArray[Any]]:
        """Return what the leader needs of this device: buffers, and weights where it is the first that has them."""
        assert self.work is not None
        state: dict[str, Any] = {} if self._session is None else self._session.named_state()
        first_of = self._names_first_here()
        stream = io.BytesIO()
        torch.save(
            {
                **state,
                "parameters": {
                    name: own
                    for name, own in state.get("parameters", {}).items()
                    if name in first_of
                },
            },
            stream,
        )
        losses = torch.stack(self._losses).double().cpu().numpy() if self._losses else np.zeros(0)
        ending = {
            "samples": np.array([self._num_samples], np.int64),
            "losses": losses,
            "state": np.frombuffer(stream.getvalue(), np.uint8),
            "device": np.frombuffer(self._label().encode(), np.uint8),
            "measured": np.array(
                [self.work.peak_bytes, self.work.peak_in_flight, self.drain_sample_s()]
            ),
        }
        ending |= {
            f"weight/{name}": parameter.detach().cpu().contiguous().numpy()
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and name in first_of
        }
        return ending | {
            f"buffer/{name}": buffer.contiguous().numpy()
            for name, buffer in self._buffers().items()
        }

    def _label(self) -> str:
        assert self.work is not None
        engine = (
            "" if self.work.int8 is None else f", int8 {self.work.int8.layers.engine.engine.kernel}"
        )
        return device_label(self.work.device) + engine

    def _names_first_here(self) -> frozenset[str]:
        return frozenset().union(
            *(
                self._names(part.first_layer, part.last_layer)
                for part in synchronised_parts(self._plan)
                if part.devices[0] == self.soc
            )
        )

    def _assembled(self, ends: Mapping[int, Mapping[str, NDArray[Any]]]) -> TrainedModel:
        weights: dict[str, Tensor] = {}
        state: dict[str, Any] = {"parameters": {}}
        buffers: dict[str, list[tuple[float, Tensor]]] = {}
        losses: NDArray[np.float64] = np.zeros(max(len(end["losses"]) for end in ends.values()))
        for end in ends.values():
            saved = torch.load(
                io.BytesIO(end["state"].tobytes()), weights_only=True, map_location="cpu"
            )
            state = {**saved, **state, "parameters": {**state["parameters"], **saved["parameters"]}}
            if len(end["losses"]):
                losses += end["losses"]
            for name, array in end.items():
                kind, _, name = name.partition("/")
                if kind == "weight":
                    weights[name] = torch.from_numpy(array)
                elif kind == "buffer":
                    buffers.setdefault(name, []).append(
                        (float(end["samples"][0]), torch.from_numpy(array))
                    )
        weights |= {name: _mean(copies) for name, copies in buffers.items()}
        stream = io.BytesIO()
        torch.save(state, stream)
        measured = {soc: end["measured"].tolist() for soc, end in ends.items()}
        return TrainedModel(
            weights=weights,
            state=stream.getvalue(),
            losses=tuple(losses.tolist()),
            peak_bytes={soc: each[0] for soc, each in measured.items()},
            peak_in_flight={soc: int(each[1]) for soc, each in measured.items()},
            sample_s={soc: each[2] for soc, each in measured.items()},
            devices={soc: end["device"].tobytes().decode() for soc, end in ends.items()},
        )


def _mean(copies: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the devices' mean of a buffer by their samples, of counters the largest, as `MemberBuffers` does."""
    first, total = copies[0][1], sum(samples for samples, _ in copies)
    if len(copies) == 1 or not total:
        return first
    if not first.is_floating_point():
        return torch.stack([own for _, own in copies]).amax(dim=0)
    mean = torch.zeros(first.shape, dtype=torch.float64)
    for samples, own in copies:
        mean += samples / total * own.double()
    return mean.to(first.dtype)


def _seed_of(key: Sequence[int]) -> int:
    return int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))
