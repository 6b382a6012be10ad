"""Members of a ring in threads of this process, struck at moments that no kill of a process can be timed to."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from socflower.errors import TrainingFailed
from socflower.model_graph.batch_form import Batch
from socflower.peers.collective import Collective, PeerLost, Poll, Work, no_poll
from socflower.peers.owner_preemption import PreemptionSwitch
from socflower.peers.ring import member as ring_member_module
from socflower.peers.ring.member import AppliedStep, MemberResult, RingMember, open_ring
from socflower.peers.transports.port import RingPort
from socflower.precision import EngineSettings, RescalingPolicy, int8_algorithm
from socflower.training.batches import BatchSchedule
from socflower.training.fp32 import FP32Session, FP32Trainer, LossFn, sgd
from socflower.training.group import train_group
from socflower.training.int8 import Int8Session, Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionSession, MixedPrecisionTrainer
from socflower.training.schedules import cosine_annealing
from socflower.training.trainer import TrainingSpan
from socflower.wire.message_keys import COMPLETED, PREEMPTED, GroupTask, RingTask
from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import LabelledData
from socflower.workloads.map_dataset import MapDataset
from tests.fake_device import in_thread
from tests.one_line import refused
from tests.peers.peers import TOKEN, free_addresses
from tests.rows import Rows
from tests.seeded import built
from tests.training.test_mixed_precision import CoarseBackend

WAIT_S = 90.0
HEARTBEAT_S = 40.0  # nobody hangs here: who dies closes its port, and a loaded machine answers late
NUM_SAMPLES, NUM_STEPS = 96, 6
BATCH_SIZE = NUM_SAMPLES // NUM_STEPS
Strike = Callable[[int, int, str, int], None]
"""Called as (rank, generation, operation, number of that operation) after a member's operation has succeeded there."""


class Died(Exception):
    """What a member that is to die raises: its port closes, as that of a process that was killed."""


class StruckRing(Collective):
    """A real ring, at whose operations a test may strike."""

    def __init__(self, ring: Collective, participant: int, generation: int, strike: Strike) -> None:
        self._ring, self._participant, self._generation, self._strike = (
            ring,
            participant,
            generation,
            strike,
        )
        self.rank, self.size, self.transport = ring.rank, ring.size, ring.transport
        self._numbers: dict[str, int] = {}

    def all_reduce(self, buffer: Tensor) -> Work:
        # The sum of the members' weights of a batch.
        operation = "weigh" if buffer.numel() == 1 else "all_reduce"
        return _StruckWork(self._ring.all_reduce(buffer), lambda: self._done(operation))

    def all_gather(self, payload: bytes, poll: Poll = no_poll) -> list[bytes]:
        gathered = self._ring.all_gather(payload, poll)
        self._done("all_gather")
        return gathered

    def broadcast(self, payload: bytes | None, source: int, poll: Poll = no_poll) -> bytes:
        content = self._ring.broadcast(payload, source, poll)
        self._done("broadcast")
        return content

    def close(self) -> None:
        self._ring.close()

    def _done(self, operation: str) -> None:
        number = self._numbers[operation] = self._numbers.get(operation, 0) + 1
        self._strike(self._participant, self._generation, operation, number)


class _StruckWork:
    def __init__(self, work: Work, done: Callable[[], None]) -> None:
        self._work, self._done = work, done

    def wait(self, poll: Poll = no_poll) -> None:
        self._work.wait(poll)
        self._done()


WEIGHTS = "own int8 models"
"""As `int8`: mixed precision that merges weights."""


def model(*, norm: bool = False, frozen: bool = False, int8: str = "") -> nn.Module:
    if int8 and int8 != WEIGHTS:
        return built(
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Flatten(),
                nn.Dropout(0.2),
                nn.Linear(32, 3),
            ),
            2,
        )

    def layers() -> nn.Module:
        first: list[nn.Module] = [nn.Flatten(), nn.Linear(16, 12)]
        if norm:
            first.append(nn.BatchNorm1d(12))
        return nn.Sequential(*first, nn.ReLU(), nn.Linear(12, 3))

    made = built(layers, 2)
    made[1].requires_grad_(not frozen)
    return made


def samples(count: int = NUM_SAMPLES) -> LabelledData:
    generator = torch.Generator().manual_seed(1)
    return LabelledData(
        inputs=torch.randint(0, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, 3, (count,), generator=generator),
        mean=(0.5,),
        std=(0.5,),
        num_classes=3,
    )


def task(
    size: int,
    num_steps: int = NUM_STEPS,
    *,
    reshuffle: bool = True,
    first_step: int = 0,
    **changes: Any,
) -> GroupTask:
    return GroupTask(
        group_id=0,
        num_groups=1,
        members=tuple(range(size)),
        leader=0,
        partitions=tuple(range(size)),
        num_partitions=size,
        capacities=(1.0,) * size,
        first_step=first_step,
        num_steps=num_steps,
        steps_per_epoch=num_steps,
        total_steps=num_steps,
        batch_size=BATCH_SIZE,
        reshuffle=reshuffle,
        deal_epoch=0,
        seed=3,
        num_samples=BATCH_SIZE * num_steps,
        **changes,
    )


def trainer(
    int8: str = "", loss: LossFn = functional.cross_entropy
) -> FP32Trainer | Int8Trainer | MixedPrecisionTrainer:
    if int8 == WEIGHTS:
        return MixedPrecisionTrainer(
            fp32=FP32Trainer(optimizer=sgd(0.1, 0.9), reduction="ring"),
            rule="paper",
            merge="weights",
            # Members are threads here, in which torch.fx cannot capture a model while another one trains.
            backend=CoarseBackend,
            npu_ratio=0.9,
            held_out=samples().batch(torch.arange(20))[0],
        )
    if int8:
        momentum = 0.9 if int8 == "adaptive-fixed-point" else 0.0
        return Int8Trainer(
            algorithm=int8_algorithm(int8, momentum),
            learning_rate=0.1,
            settings=EngineSettings(rescaling=RescalingPolicy(warm_up_batches=2)),
        )
    return FP32Trainer(optimizer=sgd(0.1, 0.9), scheduler=cosine_annealing, loss=loss, device="cpu")


class Pace:
    """A member's clock, on which nothing but its own passes takes time."""

    def __init__(self, sample_s: Sequence[float], rank: int) -> None:
        self._sample_s, self._rank, self.now_s = sample_s, rank, 0.0

    def work(self, num_samples: int) -> None:
        self.now_s += self._sample_s[self._rank] * num_samples

    def __call__(self) -> float:
        return self.now_s


class PacedTrainer:
    """The trainer of a member that is as fast as its pace says, whatever this machine is."""

    def __init__(
        self, pace: Pace, device: str, int8: str = "", loss: LossFn = functional.cross_entropy
    ) -> None:
        self._pace, self.device, self._int8, self._loss = pace, device, int8, loss

    def start(
        self, model: nn.Module, span: TrainingSpan, state: bytes | None = None
    ) -> FP32Session | Int8Session | MixedPrecisionSession:
        own = trainer(self._int8, self._loss)
        if not isinstance(own, MixedPrecisionTrainer):
            own = replace(own, device=self.device)
        session = own.start(model, span, state)
        gradients = session.gradients

        def paced(parts: Any, num_samples: int, *weight: Callable[[], float]) -> Tensor:
            self._pace.work(sum(len(labels) for _, labels in parts))
            return gradients(parts, num_samples, *weight)

        session.gradients = paced  # type: ignore[method-assign]
        return session


class SpoiltSteps(DataSource):
    """A member's view of `data`, in which its samples of some steps are NaN."""

    def __init__(self, data: DataSource, rank: int, steps: Sequence[int], task: GroupTask) -> None:
        schedule = BatchSchedule(task, [len(data)] * (1 if task.reshuffle else len(task.members)))
        self._data = data
        self._spoilt = {
            int(sample)
            for step in steps
            for sample in schedule.shares(step, range(len(task.members)))[rank]
        }

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Any, key: Sequence[int] = ()) -> Batch:
        inputs, labels = self._data.batch(indices, key)
        spoilt = [int(index) in self._spoilt for index in indices]
        return torch.where(
            torch.tensor(spoilt, dtype=torch.bool)[:, None, None, None], torch.nan, inputs
        ), labels


class Members:
    """What came of every member of a group; `sample_s` says how long each takes for a sample, by its clock."""

    def __init__(
        self,
        size: int,
        monkeypatch: pytest.MonkeyPatch,
        strike: Strike,
        *,
        norm: bool = False,
        sample_s: Sequence[float] | None = None,
        rebalance_steps: int = 0,
        num_steps: int = NUM_STEPS,
        own_data: bool = False,
        augmented: bool = False,
        frozen: bool = False,
        devices: Sequence[str] = (),
        num_buckets: int = 1,
        compression: str = "none",
        exchange: str = "ring",
        int8: str = "",
        before: "Members | None" = None,
        returns: int | None = None,
        loss: LossFn = functional.cross_entropy,
        spoilt: Mapping[int, Sequence[int]] | None = None,
        tolerate_errors: bool = False,
    ) -> None:
        def struck(
            transport: str,
            port: RingPort,
            ranks: Any,
            generation: int,
            heartbeat_s: float,
            kind: str,
        ) -> Collective:
            ring = open_ring(transport, port, ranks, generation, heartbeat_s, kind)
            return StruckRing(ring, port.rank, generation, strike)

        monkeypatch.setattr(ring_member_module, "open_ring", struck)
        self._addresses, self._norm, self._frozen = tuple(free_addresses(size)), norm, frozen
        self._task = task(
            size,
            num_steps,
            reshuffle=not own_data,
            first_step=num_steps if before else 0,
            num_buckets=num_buckets,
            compression=compression,
            exchange=exchange,
        )
        self._spoilt, self._tolerate_errors = spoilt or {}, tolerate_errors
        self._before, self._returns, self._rebalance_steps = before, returns, rebalance_steps
        self._own_data, self._augmented, self._int8, self._loss = own_data, augmented, int8, loss
        self._devices = devices or ("cpu",) * size
        self.paces = [Pace(sample_s or (0.01,) * size, rank) for rank in range(size)]
        self.models = {rank: model(norm=norm, frozen=frozen, int8=int8) for rank in range(size)}
        if before is not None:
            self.models.update(
                {rank: each for rank, each in before.models.items() if rank != returns}
            )
        self.ledgers: dict[int, list[AppliedStep]] = {rank: [] for rank in range(size)}
        # gRPC alone: a gloo ring that is closed shuts the process's connections to its ports, so a process has but one.
        with ThreadPoolExecutor(size) as threads:
            self._ends = {rank: threads.submit(self._train, rank) for rank in range(size)}

    def _train(self, rank: int) -> MemberResult:
        ring = RingTask(
            participant=rank,
            leader=0,
            addresses=self._addresses,
            token=TOKEN.hex(),
            transport="grpc",
            heartbeat_s=HEARTBEAT_S,
            rendezvous_s=60.0,
            rebalance_steps=self._rebalance_steps,
            tolerate_errors=self._tolerate_errors,
        )
        port = RingPort(
            self._addresses[rank],
            rank=rank,
            addresses=self._addresses,
            token=TOKEN,
            tls=None,
            heartbeat_s=HEARTBEAT_S,
        )
        state, compression_state = None, None
        if self._before is not None and rank != self._returns:
            before = self._before.ends[rank]
            assert before.end is not None
            state, compression_state = before.end.state, before.compression or None
        try:
            pace = self.paces[rank]
            with in_thread():
                return RingMember(
                    model=self.models[rank],
                    has_model=rank == 0,
                    data=self._data_of(rank),
                    group=self._task,
                    ring=ring,
                    trainer=PacedTrainer(pace, self._devices[rank], self._int8, self._loss),
                    port=port,
                    switch=PreemptionSwitch(),
                    state=state,
                    compression_state=compression_state,
                    on_step=self.ledgers[rank].append,
                    clock=pace,
                ).train()
        finally:
            port.close()

    def _data_of(self, rank: int) -> DataSource:
        whole = samples(self._task.num_samples)
        data = (
            whole.select(torch.arange(rank, len(whole), len(self.paces)))
            if self._own_data
            else whole
        )
        if rank in self._spoilt:
            return SpoiltSteps(data, rank, self._spoilt[rank], self._task)
        return MapDataset(Rows(data, augment=True)) if self._augmented else data

    def shares(self, step: int) -> list[int]:
        """Return how many samples each member had in a step."""
        return [len(ledger[step].samples) for ledger in self.ledgers.values()]

    @property
    def ends(self) -> Mapping[int, MemberResult]:
        """Ends of the members that did not die."""
        return {
            rank: self._end(future)
            for rank, future in self._ends.items()
            if not isinstance(future.exception(timeout=WAIT_S), Died)
        }

    @staticmethod
    def _end(future: "Future[MemberResult]") -> MemberResult:
        return future.result(timeout=WAIT_S)

    def check(self) -> None:
        """Check that survivors have all steps once, the same weights, and those of an undisturbed training."""
        reference = model(norm=self._norm, frozen=self._frozen, int8=self._int8)
        everyones = (
            [self._data_of(rank) for rank in range(len(self.paces))]
            if self._own_data
            else [self._data_of(0)]
        )
        in_one = trainer(self._int8, self._loss)
        if isinstance(in_one, FP32Trainer):
            in_one = replace(in_one, reduction="ring")
        earlier = (
            None
            if self._before is None
            else train_group(reference, everyones, self._before._task, in_one).end.state
        )
        train_group(reference, everyones, self._task, in_one, earlier)
        is_undisturbed = {*self._devices} == {"cpu"} and not any(
            end.outcome.recoveries_s for end in self.ends.values()
        )
        survivors = list(self.ends)
        for rank in survivors:
            assert self.ends[rank].outcome.outcome == COMPLETED
            steps = range(self._task.first_step, self._task.first_step + self._task.num_steps)
            assert [line.step for line in self.ledgers[rank]] == list(steps)
            for ours, first, undisturbed in zip(
                self.models[rank].parameters(),
                self.models[survivors[0]].parameters(),
                reference.parameters(),
                strict=True,
            ):
                assert torch.equal(ours.cpu(), first.cpu())
                if self._int8 == WEIGHTS:
                    # The order in which a ring adds merged weights in float64 may change their last bit.
                    torch.testing.assert_close(ours.cpu(), undisturbed, rtol=1e-6, atol=1e-8)
                elif self._int8 or (is_undisturbed and not self._rebalance_steps):
                    assert torch.equal(ours.cpu(), undisturbed)
                elif not self._norm and self._task.compression == "none":
                    np.testing.assert_allclose(
                        ours.detach().cpu(), undisturbed.detach(), atol=1e-6, rtol=1e-4
                    )
            if self._int8 == WEIGHTS:
                torch.testing.assert_close([*self.models[rank].buffers()], [*reference.buffers()])
            elif self._int8:
                assert all(map(torch.equal, self.models[rank].buffers(), reference.buffers()))
        assert sum(self.ends[rank].outcome.answers for rank in survivors) == 1


def nothing(rank: int, generation: int, operation: str, number: int) -> None:
    """Strike never."""


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 4.0, 0.0])),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["class weights", "ignored", "sum"],
)
def test_losses_that_are_no_means_over_samples_train_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, loss: LossFn
) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if rank == 1 and (generation, operation, number) == (0, "all_reduce", 3):
            raise PeerLost("struck")

    Members(3, monkeypatch, strike, loss=loss).check()


def contrast(made: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(made @ made.T, torch.arange(len(made)))


def test_a_loss_that_cannot_be_divided_is_refused_by_all_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(3, monkeypatch, nothing, loss=contrast)
    refused(lambda: members.check(), "loss")
    assert not any(members.ledgers.values())


def test_frozen_parameters_do_not_travel_when_a_member_falls_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    load_bytes = vars(ring_member_module)["_load_bytes"]

    def noting(tensors: Sequence[Tensor], payload: bytes) -> None:
        sent.append(len(payload))
        load_bytes(tensors, payload)

    monkeypatch.setattr(ring_member_module, "_load_bytes", noting)

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if rank == 2 and (generation, operation, number) == (0, "all_reduce", 3):
            raise PeerLost("struck")

    Members(3, monkeypatch, strike, frozen=True).check()
    trained_bytes = 4 * (12 * 3 + 3)
    assert sent and all(trained_bytes <= size < trained_bytes + 4 * 16 * 12 for size in sent)


@pytest.mark.parametrize("own_data", [False, True])
def test_augmentation_is_that_of_one_process_also_where_steps_are_done_again(
    monkeypatch: pytest.MonkeyPatch, own_data: bool
) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (generation, operation, number) == (0, "all_reduce", 3):
            raise PeerLost("struck")

    Members(
        3, monkeypatch, nothing if own_data else strike, augmented=True, own_data=own_data
    ).check()


@pytest.mark.parametrize("behind", [(0,), (2,), (1, 2)])
def test_a_member_a_step_behind_takes_over_what_came_of_the_step(
    monkeypatch: pytest.MonkeyPatch, behind: tuple[int, ...]
) -> None:
    """It gave its gradient, the others applied the sum, and it never got it: it may not do the step again."""

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if rank in behind and (generation, operation, number) == (0, "all_reduce", 3):
            raise PeerLost("struck")

    members = Members(3, monkeypatch, strike)
    members.check()
    adopted = [[line.step for line in members.ledgers[rank] if line.adopted] for rank in range(3)]
    # Another member may learn that the ring is broken before it has seen that its own sum was complete.
    assert all(adopted[rank] == [2] for rank in behind)
    assert all(each in ([], [2]) for each in adopted)
    assert [] in adopted


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("lost", "struck"),
    [("all_reduce", (0, 1, 2)), ("weigh", (0,)), ("weigh", (1, 2)), ("weigh", (0, 1, 2))],
)
def test_a_step_that_all_lost_is_done_again(
    monkeypatch: pytest.MonkeyPatch, lost: str, struck: tuple[int, ...]
) -> None:
    """Without the batch's weight no member has a gradient, so none can have applied the step."""

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if rank in struck and (generation, operation, number) == (0, lost, 3):
            raise PeerLost("struck")

    members = Members(3, monkeypatch, strike)
    members.check()
    assert not any(line.adopted for ledger in members.ledgers.values() for line in ledger)


@pytest.mark.parametrize(
    ("dies", "options"), [(0, {}), (2, {"compression": "powersgd"}), (1, {"int8": "niti"})]
)
def test_a_server_or_one_of_its_members_that_dies_is_lost_and_no_step_is(
    monkeypatch: pytest.MonkeyPatch, dies: int, options: dict[str, str]
) -> None:
    """The next member becomes the server."""

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (rank, generation, operation, number) == (dies, 0, "all_reduce", 3):
            raise Died

    members = Members(3, monkeypatch, strike, exchange="server", **options)
    assert list(members.ends) == [rank for rank in range(3) if rank != dies]
    members.check()


@pytest.mark.parametrize("num_taken", [1, 2])
def test_a_step_whose_only_holder_dies_while_it_hands_it_over_is_done_again(
    monkeypatch: pytest.MonkeyPatch, num_taken: int
) -> None:
    """Member 2 alone has applied a step, and dies after its weights, or weights and optimiser, have arrived at some.

    Who has the weights alone must not pass for one that has done the step.
    """
    dead = threading.Event()

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if rank in (0, 1) and (generation, operation, number) == (0, "all_reduce", 3):
            raise PeerLost("struck")
        if (
            generation > 0
            and not dead.is_set()
            and operation == "broadcast"
            and number == num_taken
        ):
            if rank == 2:
                dead.set()
                raise Died
            if num_taken == 2 and rank == 1:
                # It has both; the other one's last message was lost.
                return
            raise PeerLost("the source is gone")

    members = Members(3, monkeypatch, strike)
    assert list(members.ends) == [0, 1]
    members.check()


def test_a_leader_that_dies_with_the_model_on_its_way_leaves_it_with_those_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_it = threading.Event()

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (generation, operation, number) != (0, "broadcast", 1):
            return
        if rank == 1:
            has_it.set()
        elif rank == 2:
            raise PeerLost("struck")
        else:  # what it has sent is on its way, and would be lost with it
            assert has_it.wait(WAIT_S)
            raise Died

    members = Members(3, monkeypatch, strike)
    assert list(members.ends) == [1, 2]
    members.check()
    assert members.ends[1].outcome.answers


def test_running_statistics_see_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is done again, and one that is adopted, count once in BatchNorm's statistics too."""

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (generation, operation, number) == (0, "all_reduce", 2) or (
            rank == 1 and generation == 1 and (operation, number) == ("all_reduce", 2)
        ):
            raise PeerLost("struck")

    disturbed, quiet = (
        Members(2, monkeypatch, strike, norm=True),
        Members(2, monkeypatch, nothing, norm=True),
    )
    disturbed.check()
    assert [line.step for line in disturbed.ledgers[1] if line.adopted] == [2]
    for ours, reference in zip(
        disturbed.models[0].buffers(), quiet.models[0].buffers(), strict=True
    ):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


def test_forming_anew_twenty_times_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads: dict[int, int] = {}

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if generation < 20 and (operation, number) == ("all_reduce", 1):
            num_threads[generation] = threading.active_count()
            raise PeerLost("struck")

    members = Members(2, monkeypatch, strike)
    members.check()
    assert len(members.ends[0].outcome.recoveries_s) >= 20
    assert (
        max(num_threads[generation] for generation in (17, 18, 19) if generation in num_threads)
        <= max(num_threads[generation] for generation in (1, 2, 3) if generation in num_threads) + 6
    )


# --------------------------------------------------------------------------------------------- re-balancing


def require_each_sample_once(members: Members, num_steps: int, size: int) -> None:
    """Check the ledgers of members of which none has died: every step's batch, whole, in the order of the members."""
    schedule = BatchSchedule(task(size, num_steps), [BATCH_SIZE * num_steps])
    for step in range(num_steps):
        together = [
            sample for ledger in members.ledgers.values() for sample in ledger[step].samples
        ]
        assert together == schedule.batch(step)[0].tolist()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_weights_under_any_rebalancing_equal_the_full_batch_step(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    num_steps = 6 * every
    members = Members(
        3,
        monkeypatch,
        nothing,
        sample_s=(0.01, 0.02, 0.05),
        rebalance_steps=every,
        num_steps=num_steps,
    )
    members.check()
    require_each_sample_once(members, num_steps, 3)
    assert members.shares(4 * every - 1) == [6, 5, 5]
    assert (
        members.shares(4 * every) == members.shares(num_steps - 1) == [9, 5, 2]
    )  # as 100, 50 and 20 of 170
    assert (
        members.ends[0].outcome.rates
        == members.ends[2].outcome.rates
        == pytest.approx((100.0, 50.0, 20.0))
    )


def test_shares_follow_a_member_that_slows_down_between_two_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample_s = [0.01, 0.01]

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (rank, operation, number) == (1, "all_reduce", 5):
            sample_s[1] = 0.03

    members = Members(2, monkeypatch, strike, sample_s=sample_s, rebalance_steps=1, num_steps=14)
    members.check()
    require_each_sample_once(members, 14, 2)
    assert members.shares(5) == [8, 8]
    assert members.shares(13) == [12, 4]


@pytest.mark.parametrize("behind", [(0,), (2,), (1, 2)])
def test_members_that_missed_an_exchange_go_by_what_the_others_know(
    monkeypatch: pytest.MonkeyPatch, behind: tuple[int, ...]
) -> None:
    """It reached some of them: these feed it to their filters, and the ring forms again. All must split alike then."""

    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        # The first two of a generation agree on what is known, and that all members are alike.
        if rank in behind and (generation, operation, number) == (0, "all_gather", 2 + 4):
            raise PeerLost("struck")

    members = Members(
        3, monkeypatch, strike, sample_s=(0.01, 0.02, 0.05), rebalance_steps=1, num_steps=8
    )
    members.check()
    require_each_sample_once(members, 8, 3)
    assert (
        members.shares(4) == members.shares(7) == [9, 5, 2]
    )  # the fourth exchange moved shares, for all of them


def test_an_exchange_that_all_missed_is_made_up_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (generation, operation, number) == (0, "all_gather", 2 + 4):
            raise PeerLost("struck")

    members = Members(
        3, monkeypatch, strike, sample_s=(0.01, 0.02, 0.05), rebalance_steps=1, num_steps=8
    )
    members.check()
    require_each_sample_once(members, 8, 3)
    assert members.shares(4) == [6, 5, 5]
    assert members.shares(5) == members.shares(7) == [9, 5, 2]


def test_what_a_dead_member_had_is_shared_by_what_is_known_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (rank, generation, operation, number) == (0, 0, "all_reduce", 7):
            raise Died

    members = Members(
        3, monkeypatch, strike, sample_s=(0.01, 0.01, 0.03), rebalance_steps=1, num_steps=9
    )
    assert list(members.ends) == [1, 2]
    members.check()
    assert members.shares(5) == [7, 7, 2]
    assert [len(members.ledgers[rank][7].samples) for rank in (1, 2)] == [12, 4]
    assert members.ends[1].outcome.rates == pytest.approx((100.0, 100.0 / 3))


def test_where_each_member_has_its_own_data_shares_stay_and_speeds_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(
        2,
        monkeypatch,
        nothing,
        sample_s=(0.01, 0.05),
        rebalance_steps=1,
        num_steps=8,
        own_data=True,
    )
    members.check()
    assert all(members.shares(step) == [8, 8] for step in range(8))
    assert members.ends[0].outcome.rates == pytest.approx((100.0, 20.0))


def test_without_rebalancing_shares_stay_and_speeds_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(2, monkeypatch, nothing, sample_s=(0.01, 0.05), num_steps=8)
    members.check()
    assert all(members.shares(step) == [8, 8] for step in range(8))
    assert members.ends[1].outcome.rates == pytest.approx((100.0, 20.0))


class _SlowLayer(nn.Module):
    """A layer that takes its time, and says that it was run."""

    def __init__(self, seconds: float, ran: list[float]) -> None:
        super().__init__()
        self._seconds, self._ran = seconds, ran

    def forward(self, inputs: Tensor) -> Tensor:
        self._ran.append(time.monotonic())
        time.sleep(self._seconds)
        return inputs


def test_a_device_is_left_within_a_layer_not_after_a_step() -> None:
    """A step of eight layers of 0.4 s: whoever asks in the second one does not wait for the eighth."""
    ran: list[float] = []
    slow = nn.Sequential(nn.Flatten(), *(_SlowLayer(0.4, ran) for _ in range(8)), nn.Linear(16, 3))
    address = free_addresses(1)[0]
    ring = RingTask(
        participant=0,
        leader=0,
        addresses=(address,),
        token=TOKEN.hex(),
        transport="grpc",
        heartbeat_s=HEARTBEAT_S,
        rendezvous_s=60.0,
    )
    port = RingPort(
        address, rank=0, addresses=[address], token=TOKEN, tls=None, heartbeat_s=HEARTBEAT_S
    )
    switch = PreemptionSwitch()

    def ask() -> None:
        while len(ran) < 2:
            time.sleep(0.01)
        switch.activate()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        end = RingMember(
            model=slow,
            has_model=True,
            data=samples(),
            group=task(1),
            ring=ring,
            trainer=trainer(),
            port=port,
            switch=switch,
        ).train()
    finally:
        port.close()
    asking.join()
    assert end.outcome.outcome == PREEMPTED
    assert end.outcome.num_steps == 0
    assert len(ran) <= 4, f"{len(ran)} of 8 layers ran before the device was left"


# ------------------------------------------------------------------------------------------------- int8

ALGORITHMS = ("niti", "adaptive-fixed-point")


@pytest.mark.parametrize(
    ("int8", "own_data"),
    [
        ("niti", False),
        pytest.param("niti", True, marks=pytest.mark.slow),
        pytest.param("adaptive-fixed-point", False, marks=pytest.mark.slow),
    ],
)
def test_int8_members_train_what_one_process_does_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, int8: str, own_data: bool
) -> None:
    Members(3, monkeypatch, nothing, int8=int8, own_data=own_data).check()


@pytest.mark.slow
@pytest.mark.parametrize("int8", ALGORITHMS)
def test_a_member_that_comes_back_without_model_and_state_continues_in_int8(
    monkeypatch: pytest.MonkeyPatch, int8: str
) -> None:
    first = Members(3, monkeypatch, nothing, int8=int8)
    Members(3, monkeypatch, nothing, int8=int8, before=first, returns=2).check()


@pytest.mark.parametrize("own_data", [False, True])
def test_members_with_int8_models_of_their_own_merge_what_one_process_does(
    monkeypatch: pytest.MonkeyPatch, own_data: bool
) -> None:
    """Over two intervals: the second begins at the alphas of the first."""
    first = Members(3, monkeypatch, nothing, int8=WEIGHTS, norm=True, own_data=own_data)
    first.check()
    Members(
        3, monkeypatch, nothing, int8=WEIGHTS, norm=True, own_data=own_data, before=first
    ).check()


def test_a_ring_of_one_in_int8_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Members(1, monkeypatch, nothing, int8="niti").check()


@pytest.mark.slow
@pytest.mark.parametrize("int8", ALGORITHMS)
@pytest.mark.parametrize(
    ("struck", "number"), [((0,), 5), ((1, 2), 24), ((0, 1, 2), 31), ((2,), 40), ((1,), 47)]
)
def test_int8_weights_are_those_of_an_undisturbed_training_wherever_a_ring_breaks(
    monkeypatch: pytest.MonkeyPatch, int8: str, struck: tuple[int, ...], number: int
) -> None:
    """In the passes of the first steps, where exponents are searched, and in later ones, where they are known."""

    def strike(rank: int, generation: int, operation: str, count: int) -> None:
        if rank in struck and (generation, operation, count) == (0, "all_reduce", number):
            raise PeerLost("struck")

    members = Members(3, monkeypatch, strike, int8=int8)
    members.check()
    assert all(end.outcome.recoveries_s for end in members.ends.values())


@pytest.mark.parametrize(
    "int8", ["niti", pytest.param("adaptive-fixed-point", marks=pytest.mark.slow)]
)
def test_int8_weights_stay_when_a_member_dies_and_shares_change(
    monkeypatch: pytest.MonkeyPatch, int8: str
) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (rank, generation, operation, number) == (0, 0, "all_reduce", 60):
            raise Died

    members = Members(
        3,
        monkeypatch,
        strike,
        sample_s=(0.01, 0.01, 0.05),
        rebalance_steps=1,
        num_steps=12,
        int8=int8,
    )
    assert list(members.ends) == [1, 2]
    members.check()
    shares = [
        tuple(len(members.ledgers[rank][step].samples) for rank in (1, 2)) for step in range(12)
    ]
    assert shares[-1] == (13, 3), shares


def test_int8_refuses_a_compression_of_sums_that_have_to_be_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(1, monkeypatch, nothing, int8="niti", compression="fp16")
    refused(lambda: members.check(), "fp16")


def without_spoilt(spoilt: Mapping[int, Sequence[int]], loss: LossFn, *, norm: bool) -> nn.Module:
    """Return what one process makes of the steps without the members that are spoilt in them."""
    reference, group, data = model(norm=norm), task(3), samples()
    schedule = BatchSchedule(group, [len(data)])
    span = TrainingSpan(num_members=3, total_steps=NUM_STEPS, steps_per_epoch=NUM_STEPS)
    session = trainer(loss=loss).start(reference, span)
    for step in range(NUM_STEPS):
        session.step(
            [
                data.batch(share[:0] if step in spoilt.get(member, ()) else share)
                for member, share in enumerate(schedule.shares(step, range(3)))
            ]
        )
    session.finish()
    return reference


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("spoilt", "options"),
    [
        ({1: [2]}, {}),
        ({0: [0], 2: [0, 5]}, {"num_buckets": 3}),
        ({1: range(NUM_STEPS)}, {"norm": True}),
        ({2: [1]}, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 4.0, 0.5]))}),
        ({2: [1, 2]}, {"own_data": True}),
    ],
    ids=["one step", "two at once", "always, with BatchNorm", "class weights", "own data"],
)
@pytest.mark.parametrize("tolerate_errors", [False, True])
def test_a_gradient_that_is_not_finite_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
    spoilt: Mapping[int, Sequence[int]],
    options: dict[str, Any],
    tolerate_errors: bool,
) -> None:
    members = Members(
        3, monkeypatch, nothing, spoilt=spoilt, tolerate_errors=tolerate_errors, **options
    )
    if not tolerate_errors:
        first = min(step for steps in spoilt.values() for step in steps)
        culprit = min(rank for rank, steps in spoilt.items() if first in steps)
        # All of them: none goes on alone.
        for end in members._ends.values():
            with pytest.raises(
                TrainingFailed, match=rf"gradient of SoC {culprit} in step {first} has NaN"
            ):
                end.result(timeout=WAIT_S)
        return
    said = members.ends[0].outcome.dropped
    assert all(end.outcome.dropped == said for end in members.ends.values())
    named = sorted((step, rank) for rank, steps in spoilt.items() for step in steps)
    for line, (step, rank) in zip(said, named[:3], strict=False):
        assert line.startswith(
            f"the gradient of SoC {rank} in step {step} has NaN or infinite values"
        )
    assert len(said) == len(named[:3]) + (len(named) > 3)
    if not options.get("own_data"):
        reference = without_spoilt(
            spoilt, options.get("loss", functional.cross_entropy), norm="norm" in options
        )
        for rank, trained in members.models.items():
            for ours, theirs in zip(trained.parameters(), reference.parameters(), strict=True):
                np.testing.assert_allclose(ours.detach(), theirs.detach(), atol=1e-6, rtol=1e-4)
            assert all(torch.isfinite(buffer).all() for buffer in trained.buffers()), rank


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("compression", ["fp16", "int8", "int8-stochastic", "dgc"])
def test_compression_keeps_nothing_of_a_gradient_that_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    members = Members(
        3, monkeypatch, nothing, spoilt={1: [2]}, tolerate_errors=True, compression=compression
    )
    assert [line[:31] for line in members.ends[2].outcome.dropped] == [
        "the gradient of SoC 1 in step 2"
    ]
    assert all(
        torch.isfinite(parameter).all()
        for trained in members.models.values()
        for parameter in trained.parameters()
    )


def test_nobody_is_blamed_where_no_gradient_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has diverged: the group's reply is refused later, as that of a group in one process."""
    members = Members(3, monkeypatch, nothing, spoilt={rank: [3] for rank in range(3)})
    assert [end.outcome.dropped for end in members.ends.values()] == [()] * 3
    assert all(torch.isnan(parameter).any() for parameter in members.models[1].parameters())


def test_a_member_is_lost_while_others_look_for_a_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        # Of each step one sum; the third is that of the spoilt step, the fourth the one without its culprit.
        if rank == 2 and (generation, operation, number) == (0, "all_reduce", 4):
            raise PeerLost("struck")

    members = Members(3, monkeypatch, strike, spoilt={1: [2]}, tolerate_errors=True)
    reference = without_spoilt({1: [2]}, functional.cross_entropy, norm=False)
    for trained in members.models.values():
        for ours, theirs in zip(trained.parameters(), reference.parameters(), strict=True):
            np.testing.assert_allclose(ours.detach(), theirs.detach(), atol=1e-6, rtol=1e-4)
    assert sum(end.outcome.answers for end in members.ends.values()) == 1


class Touched(DataSource):
    """A member's view of `data`, whose samples `touch` changes: called with inputs, labels and the number of reads."""

    def __init__(self, data: DataSource, touch: Callable[[Tensor, Tensor, int], None]) -> None:
        self._data, self._touch, self._num_reads = data, touch, 0

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Any, key: Sequence[int] = ()) -> Batch:
        inputs, labels = self._data.batch(indices, key)
        self._num_reads += 1
        self._touch(inputs, labels, self._num_reads)
        return inputs, labels


def touched(
    monkeypatch: pytest.MonkeyPatch,
    touches: Mapping[int, Callable[[Tensor, Tensor, int], None]],
    **options: Any,
) -> Members:
    data_of = Members._data_of
    monkeypatch.setattr(
        Members,
        "_data_of",
        lambda self, rank: Touched(
            data_of(self, rank), touches.get(rank, lambda inputs, labels, reads: None)
        ),
    )
    return Members(3, monkeypatch, nothing, tolerate_errors=True, **options)


def equal_weights(members: Members) -> bool:
    first, *others = (list(model.parameters()) for model in members.models.values())
    return all(
        torch.equal(ours, theirs)
        for other in others
        for ours, theirs in zip(first, other, strict=True)
    )


def test_a_fault_that_has_passed_repeats_the_step_and_names_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = touched(
        monkeypatch,
        {1: lambda inputs, labels, reads: inputs.fill_(torch.nan) if reads == 3 else None},
    )
    members.check()
    assert all(end.outcome.dropped == () for end in members.ends.values())


def test_members_that_diverge_in_different_places_keep_equal_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(made: Tensor, labels: Tensor) -> Tensor:
        """A finite loss, whose gradient is not finite in the rows of these labels."""
        return (
            functional.cross_entropy(made, labels)
            + (made.gather(1, labels[:, None]) * 0.0).sqrt().mean()
        )

    def only(label: int) -> Callable[[Tensor, Tensor, int], None]:
        def touch(inputs: Tensor, labels: Tensor, reads: int) -> None:
            labels.fill_(label)

        return touch

    members = touched(monkeypatch, {rank: only(rank) for rank in range(3)}, loss=loss)
    assert all(end.outcome.dropped == () for end in members.ends.values())
    assert all(
        torch.equal(ours.isnan(), theirs.isnan())
        for ours, theirs in zip(
            members.models[0].parameters(), members.models[2].parameters(), strict=True
        )
    )


@pytest.mark.parametrize("ignoring", [(2,), (0, 2)], ids=["one of the others", "all the others"])
def test_samples_that_do_not_count_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, ignoring: Sequence[int]
) -> None:
    """In the step of a culprit all labels of other members are ignored; without the culprit none may count."""

    def ignore(inputs: Tensor, labels: Tensor, reads: int) -> None:
        if 2 <= reads <= 4:
            labels.fill_(-100)

    members = touched(
        monkeypatch,
        {
            1: lambda inputs, labels, reads: inputs.fill_(torch.nan) if 2 <= reads <= 3 else None,
            **dict.fromkeys(ignoring, ignore),
        },
    )
    assert {end.outcome.outcome for end in members.ends.values()} == {COMPLETED}
    assert [line[:31] for line in members.ends[0].outcome.dropped] == [
        "the gradient of SoC 1 in step 1"
    ]
    assert equal_weights(members) and all(
        torch.isfinite(each).all() for each in members.models[0].parameters()
    )
    assert [len(ledger) for ledger in members.ledgers.values()] == [
        NUM_STEPS - (len(ignoring) == 2)
    ] * 3


def test_the_time_of_a_repeated_step_gives_a_culprit_no_larger_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(
        3, monkeypatch, nothing, spoilt={1: [0, 2]}, tolerate_errors=True, rebalance_steps=1
    )
    rates = members.ends[0].outcome.rates
    assert max(rates) == pytest.approx(min(rates))


def test_a_buffer_that_the_forward_pass_assigns_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training and len(inputs):
                self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(dim=0)
            return inputs - self.mean

    monkeypatch.setattr(
        sys.modules[__name__],
        "model",
        lambda **options: built(lambda: nn.Sequential(nn.Flatten(), Mean(), nn.Linear(16, 3)), 2),
    )
    members = Members(3, monkeypatch, nothing, spoilt={1: [2]}, tolerate_errors=True)
    assert [line[:31] for line in members.ends[0].outcome.dropped] == [
        "the gradient of SoC 1 in step 2"
    ]
    assert all(torch.isfinite(each[1].mean).all() for each in members.models.values())
