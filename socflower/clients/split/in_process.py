"""Both halves of a split training in one process: real gradients, in the order of the simulated schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from numpy.typing import NDArray

from socflower.clients.split.saved_halves import SplitState
from socflower.edgecloud.plan.decision import WindowSchedule
from socflower.edgecloud.plan.timeline_actions import Action, decode_actions
from socflower.edgecloud.runtime.back import TorchBack
from socflower.edgecloud.runtime.feature_path import FeatureCoding
from socflower.edgecloud.runtime.front import TorchFront
from socflower.edgecloud.runtime.half_state import mean_loss
from socflower.edgecloud.runtime.in_process import run_actions
from socflower.edgecloud.samples import BatchOrder, PartyBatches
from socflower.edgecloud.split_program import Arrays, PlacedHalf, SplitProgram
from socflower.errors import ConfigError
from socflower.hierarchy.averaging import weighted_average
from socflower.model_graph.batch_form import Batch
from socflower.plain_numbers import plain_numbers
from socflower.training.model_state import require_same_base
from socflower.wire.codecs.error_feedback import Form
from socflower.wire.codecs.quantisation import Grouping
from socflower.wire.message_keys import FROZEN_SHA256
from socflower.wire.split_message_keys import EDGE_ALONE, JOINED, OWN, SplitReport, SplitTask
from socflower.workloads.data_source import DataSource, Indices
from socflower.workloads.map_dataset import as_data_source

Fronts: TypeAlias = Sequence[PlacedHalf[TorchFront]]
Backs: TypeAlias = Sequence[PlacedHalf[TorchBack]]


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """How features and gradients are encoded for transfer; the same on all engines."""

    feedback: Form = "none"
    grouping: Grouping = "tensor"
    # Memory for delta coding at each end; 0: no delta coding.
    delta_bytes: int = 0
    # The window K by progress of the training, on a real link; default: the task's.
    window: WindowSchedule | None = None
    # Batches between two checkpoints on a real link; 0: a checkpoint only at the end of a round.
    checkpoint_batches: int = 0

    def __post_init__(self) -> None:
        if self.delta_bytes and self.feedback != "none":
            raise ConfigError(
                f"SplitSettings: feedback = {self.feedback!r} beside delta_bytes = {self.delta_bytes}: "
                "changes of features are sent without error feedback; leave one of the two out"
            )

    def coding(self, gradient_bits: int) -> FeatureCoding:
        """Return how features and gradients are coded."""
        return FeatureCoding(
            grouping=self.grouping,
            feedback=self.feedback,
            delta_bytes=self.delta_bytes,
            gradient_bits=gradient_bits,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanOutcome:
    """The result of a client's part of a round."""

    arrays: Arrays
    mean_loss: float
    num_samples: int
    # Only on a real link.
    report: SplitReport | None = None
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ReverseSplitData(DataSource):
    """The cloud's inputs in a reverse split, with the labels that an edge with all layers trains on."""

    cloud: DataSource
    edge: DataSource

    def __len__(self) -> int:
        return len(self.cloud)

    def batch(self, indices: Indices, key: Sequence[int] = ()) -> Batch:
        return self.cloud.batch(indices, key)[0], self.edge.batch(indices, key)[1]


def train_in_process(
    program: SplitProgram,
    task: SplitTask,
    arrays: Arrays,
    data: Sequence[Any],
    cloud_data: Sequence[Any] | None,
    state: SplitState,
    settings: SplitSettings,
) -> SpanOutcome:
    """Train all of the task's parties and their cloud halves; `arrays` are those of the whole model.

    Parties that take turns are averaged at the end, by samples; a single party or joined parties keep their optimisers.
    """
    batches = [
        party_batches(program, task, party, own)
        for party, own in zip(task.parties, data, strict=True)
    ]
    fronts, backs = _halves(program, task, batches, cloud_data)
    resumed = resumed_halves(task, fronts, backs)
    events = resume(resumed, state)
    halves: list[PlacedHalf[Any]] = [*fronts, *backs]
    for half in halves:
        load_half(program, task, half, arrays)
    reports = run_actions(
        _renumbered_actions(task),
        [half.half for half in fronts],
        [half.half for half in backs],
        joined=task.mode == JOINED,
        coding=settings.coding(task.gradient_bits),
    )
    if resumed:
        state.save([half.half.save() for half in resumed], [cut_of(front) for front in fronts])
    return SpanOutcome(
        arrays=_full_model(task, fronts, backs, batches),
        mean_loss=mean_loss(*reports),
        events=events,
        num_samples=sum(
            num_samples(task, each) for each in (batches[:1] if task.mode == JOINED else batches)
        ),
    )


def require_same_program(where: str, program: SplitProgram, fingerprint: str) -> None:
    """Raise `ConfigError` if the server cut another model than this machine's program has."""
    own = program.fingerprint()
    if fingerprint != own:
        raise ConfigError(
            f"{where}: the server cut another model ({fingerprint[:12]}) than this machine's "
            f"({own[:12]}); run the same code on both"
        )


def party_batches(
    program: SplitProgram,
    task: SplitTask,
    party: int,
    data: Any,
    *,
    first: int = 0,
) -> PartyBatches:
    """Return a party's batches, numbered from `first` as 0; joined parties have the same samples in the same order.

    `data` is what a user's `data_fn` returned; `ConfigError` if its samples cannot be read by number.
    """
    source = as_data_source(data)
    key = 0 if task.mode == JOINED else party
    return PartyBatches(
        source,
        BatchOrder(len(source), task.batches_per_epoch, task.seed, key),
        first,
        program.divide,
        task.total_batches,
    )


def load_half(
    program: SplitProgram, task: SplitTask, half: PlacedHalf[Any], arrays: Arrays
) -> None:
    """Set a half's tensors to what the server sent; frozen parameters that it did not send must be the server's."""
    half.load(arrays)
    if task.frozen_sha256 or half.half.keeps_frozen:
        require_same_base(program.frozen_sha256, task.frozen_sha256 or None, FROZEN_SHA256)


def resumed_halves(
    task: SplitTask,
    fronts: Fronts,
    backs: Backs,
) -> list[PlacedHalf[TorchFront] | PlacedHalf[TorchBack]]:
    """Return the halves that are not averaged with others, whose optimiser state is therefore kept."""
    if task.num_parties == 1 or task.mode == JOINED:
        return [*fronts, *backs]
    return [] if task.mode == OWN else list(backs)


def resume(halves: Sequence[PlacedHalf[Any]], state: SplitState) -> tuple[str, ...]:
    """Restore the saved halves; return an event text if they are missing."""
    if not halves:
        return ()
    saved = state.read()
    if saved is None:
        what, new = ("optimisers", "new ones") if len(halves) > 1 else ("optimiser", "a new one")
        first = state.task.first_batch
        return (
            ()
            if first == 0
            else (f"nothing is left of the {what} before batch {first}; continued with {new}",)
        )
    for half, one in zip(halves, saved, strict=True):
        half.half.restore(one)
    return ()


def cut_of(half: PlacedHalf[Any]) -> int:
    """Return a half's cut, as encoded in tasks."""
    return EDGE_ALONE if half.half.cut == half.half.all_layers_cut else half.half.cut


def _halves(
    program: SplitProgram,
    task: SplitTask,
    batches: Sequence[PartyBatches],
    cloud_data: Sequence[Any] | None,
) -> tuple[Fronts, Backs]:
    cuts = [None if cut == EDGE_ALONE else cut for cut in task.cuts]
    sources = (
        batches
        if cloud_data is None
        else [
            party_batches(program, task, party, _ReverseSplitData(as_data_source(cloud), own.data))
            for party, cloud, own in zip(task.parties, cloud_data, batches, strict=True)
        ]
    )
    fronts = [
        program.front(party, cut, source)
        for party, cut, source in zip(task.parties, cuts, sources, strict=True)
    ]
    targets = list(batches) if task.reverse else [None] * len(batches)
    backs = [program.back(cut, target) for cut, target in zip(cuts, targets, strict=True)]
    return fronts, backs if task.mode == OWN else backs[:1]


def _full_model(
    task: SplitTask,
    fronts: Fronts,
    backs: Backs,
    batches: Sequence[PartyBatches],
) -> dict[str, NDArray[Any]]:
    """Return the whole model: joined parties each have a part; parties that take turns are averaged (F8)."""
    parts = [front.arrays() for front in fronts]
    if task.mode != JOINED:
        parts = [weighted_average(parts, [float(num_samples(task, each)) for each in batches])]
    return {
        name: array
        for half in (*(back.arrays() for back in backs), *parts)
        for name, array in half.items()
    }


def _renumbered_actions(task: SplitTask) -> list[Action]:
    """Return the actions with parties numbered by their position in the task."""
    place = {party: index for index, party in enumerate(task.parties)}
    return [replace(action, party=place[action.party]) for action in decode_actions(task.actions)]


def num_samples(task: SplitTask, batches: PartyBatches) -> int:
    """Return how many samples a party trains on in the task's span."""
    return sum(
        len(batches.order.rows(batch))
        for batch in range(task.first_batch, task.first_batch + task.num_batches)
    )
