"""Compressed exchanges of leaders from round to round: the feedback is with the group, whoever leads it."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Krum
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.clients.app import make_client_app
from socflower.engines.local.grid import LocalGrid
from socflower.hierarchy import SyncInterval, plan_groups, unpredicted_exchanges
from socflower.peers.leaders.model_changes import Floats, MemberChanges, feedback_digest
from socflower.peers.leaders.model_exchange import GroupsModel, exchange_in_process, feedback_after
from socflower.peers.transports.in_process import in_process_rings
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.group_models import GroupMean
from socflower.strategies.leader_feedback import feedback_after_round, from_arrays, to_arrays
from socflower.strategies.round import GroupFeedback, Round
from socflower.strategies.settings import ExchangeSettings
from socflower.strategies.socflow import SoCFlow
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import (
    COMPLETED,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    OUTCOME,
    RingOutcome,
    encode,
)
from tests.one_line import refused
from tests.process_grid import ProcessGrid
from tests.strategies import ring_app
from tests.strategies.fake_messages import NODES, FakeGrid, model
from tests.strategies.faulty_run import FaultyRun
from tests.strategies.test_around import private, socflow

NUM_GROUPS, NUM_MEMBERS, NUM_VALUES = 3, 3, 5
PLAN = plan_groups(ring_app.cluster(NUM_GROUPS, NUM_MEMBERS), NUM_GROUPS)


# ------------------------------------------------------------------------------------------- any leaders, any losses
@dataclass
class Nodes:
    """The members of all groups, of which each keeps one feedback, and the hub's knowledge of it."""

    common: Floats = field(default_factory=lambda: np.zeros(NUM_VALUES, np.float32))
    kept: dict[int, Floats] = field(default_factory=dict)  # by SoC
    known: dict[int, GroupFeedback] = field(default_factory=dict)

    def round(self, plans: dict[int, "Planned"], generator: np.random.Generator) -> "Done":
        """Train a round, of groups whose leaders meet, and return what went into it and came of it."""
        changes, owns = {}, {}
        for group, planned in plans.items():
            changes[group] = self._changes(group, planned.present)
            change = generator.normal(scale=0.1, size=NUM_VALUES).astype(np.float32)
            owns[group] = GroupsModel(
                arrays={"w": self.common + change},
                samples=float(generator.integers(1, 9)),
                groups=(group,),
            )
        meeting = [group for group in plans if plans[group].meets]
        mean = (
            exchange_in_process(
                [owns[group] for group in meeting],
                [changes[group][plans[group].leader].compression() for group in meeting],
            )
            if meeting
            else None
        )
        sent = {group: changes[group][plans[group].leader].feedback for group in meeting}
        replies = []
        for group in meeting:
            assert mean is not None
            planned = plans[group]
            # Whom the leader has told, itself among them.
            for soc in planned.handed:
                changes[group][soc].on_mean(
                    lambda own, group=group: feedback_after(owns[group], mean, own)
                )  # type: ignore[misc]
                if (feedback := changes[group][soc].feedback) is not None:
                    self.kept[soc] = feedback
            if planned.replies:
                answers = changes[group][planned.handed[0]]
                replies.append(reply_of(group, mean.groups, feedback_digest(answers.feedback)))
        means = [] if mean is None else [GroupMean(arrays=model(), samples=1.0, groups=mean.groups)]
        self.known = feedback_after_round(round_of(self.known), means, replies)
        before, self.common = self.common, self.common if mean is None else mean.arrays["w"]
        return Done(
            moved=self.common.astype(np.float64) - before,
            sent=sent,
            wanted=sum(
                (
                    (owns[group].arrays["w"].astype(np.float64) - before)
                    * (owns[group].samples / mean.samples)
                    for group in meeting
                    if mean is not None
                ),
                start=np.zeros(NUM_VALUES),
            ),
        )

    def owed(self, group: int) -> Floats | None:
        """Return what any living member holds of what the group owes."""
        sha256 = self.known.get(group, GroupFeedback()).sha256
        held = [
            self.kept[soc]
            for soc in members(group)
            if soc in self.kept and feedback_digest(self.kept[soc]) == sha256
        ]
        return held[0] if held else None

    def _changes(self, group: int, present: tuple[int, ...]) -> dict[int, MemberChanges]:
        sha256 = self.known.get(group, GroupFeedback()).sha256
        own = [
            MemberChanges(
                "int8",
                (),
                kept
                if sha256
                and (kept := self.kept.get(soc)) is not None
                and feedback_digest(kept) == sha256
                else None,
                sha256,
            )
            for soc in present
        ]
        for each in own[: 1 + len(own) // 2]:
            each.begin({"w": self.common})
        held = [each.held for each in own]
        rings = in_process_rings(len(own))

        def complete(rank: int) -> None:
            own[rank].complete(
                held,
                lambda source, make: rings[rank].broadcast(
                    make() if source == rank else None, source
                ),
            )

        with ThreadPoolExecutor(len(own)) as threads:
            list(threads.map(complete, range(len(own))))
        return dict(zip(present, own, strict=True))


@dataclass(frozen=True)
class Planned:
    present: tuple[int, ...]  # members of the group's ring
    leader: int
    handed: tuple[int, ...]  # members that get the mean
    meets: bool  # whether its leader meets the others
    replies: bool  # whether any of its replies comes


@dataclass(frozen=True)
class Done:
    moved: Any
    wanted: Any
    sent: dict[int, Floats | None]  # what was owed and is in the mean


def members(group: int) -> tuple[int, ...]:
    return tuple(range(group * NUM_MEMBERS, (group + 1) * NUM_MEMBERS))


def round_of(feedback: dict[int, GroupFeedback]) -> Round:
    return Round(
        server_round=1,
        interval=SyncInterval(index=0, first_step=0, num_steps=1, deal_epoch=0, epoch_end=1.0),
        plan=PLAN,
        exchanges=unpredicted_exchanges(PLAN, False, "ring", "int8"),
        costs=None,
        node_of={soc: soc + 1 for soc in PLAN.participants},
        transport="gloo",
        sent=ArrayRecord(),
        settled_by_grid=True,
        feedback=feedback,
    )


def reply_of(group: int, met: tuple[int, ...], sha256: str) -> Message:
    outcome = RingOutcome(
        outcome=COMPLETED, members=(), num_steps=1, answers=True, met=met, feedback_sha256=sha256
    )
    return Message(
        RecordDict(
            {
                OUTCOME: ConfigRecord(encode(outcome)),
                METRICS: MetricRecord({GROUP_ID: group, NUM_EXAMPLES: 1}),
            }
        ),
        reply_to=Message(RecordDict(), NODES[0], "train"),
    )


@st.composite
def planned_rounds(draw: st.DrawFn) -> dict[int, Planned]:
    plans = {}
    for group in range(NUM_GROUPS):
        present = tuple(draw(st.lists(st.sampled_from(members(group)), min_size=1, unique=True)))
        handed = tuple(draw(st.lists(st.sampled_from(present), min_size=1, unique=True)))
        plans[group] = Planned(
            present=present,
            leader=draw(st.sampled_from(present)),
            handed=handed,
            meets=draw(st.integers(0, 4)) > 0,
            replies=draw(st.integers(0, 6)) > 0,
        )
    return plans


@settings(deadline=None, max_examples=12)
@given(rounds=st.lists(planned_rounds(), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_whoever_leads_and_whoever_is_lost_each_change_is_sent_once_or_still_owed(
    rounds: list[dict[int, Planned]], seed: int
) -> None:
    """What moved the model is the groups' changes, and what they owed before, less what they owe after."""
    nodes, generator = Nodes(), np.random.default_rng(seed)
    for plans in rounds:
        owed_before = {group: nodes.owed(group) for group in plans}
        done = nodes.round(plans, generator)
        meeting = [group for group in plans if plans[group].meets]
        for group, planned in plans.items():
            if not planned.meets:
                assert same(nodes.owed(group), owed_before[group])  # and so not sent
                continue
            before = owed_before[group]
            if before is None or any(soc in nodes.kept for soc in planned.present):
                # It was sent if a member of the ring held it, and else not at all: its holders were away.
                assert done.sent[group] is None or same(done.sent[group], before)
            if not planned.replies and len(meeting) > 1:
                assert (
                    nodes.owed(group) is None
                )  # it went with those that met; it is not sent again
        if all(plans[group].replies for group in meeting) and len(meeting) > 1:
            owed, sent = (
                sum((each for each in some if each is not None), start=np.zeros(NUM_VALUES))
                for some in ([nodes.owed(group) for group in meeting], done.sent.values())
            )
            assert all(nodes.owed(group) is not None for group in meeting)
            np.testing.assert_allclose(done.moved + owed, done.wanted + sent, atol=1e-6)


def same(one: Floats | None, other: Floats | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def test_what_is_kept_is_the_same_after_a_checkpoint() -> None:
    kept = {
        0: GroupFeedback(values=np.ones(3, np.float32), socs=frozenset({2, 0})),
        4: GroupFeedback(sha256="ab12"),
    }
    arrays = to_arrays(kept)
    back = from_arrays(arrays)
    assert (
        back[0].socs == {0, 2}
        and np.array_equal(cast(Floats, back[0].values), np.ones(3))
        and back[0].sha256 == ""
    )
    assert (back[4].values, back[4].socs, back[4].sha256) == (None, frozenset(), "ab12")
    assert from_arrays({}) == {} == to_arrays({})


def test_a_group_that_answers_with_its_own_model_still_owes_and_one_whose_members_met_apart_does_not() -> (
    None
):
    before = {group: GroupFeedback(sha256=f"owed {group}") for group in range(3)}
    met = GroupMean(arrays=model(), samples=2.0, groups=(0, 1))
    alone = GroupMean(arrays=model(), samples=1.0, groups=(2,))
    asked_again = reply_of(1, (), "")  # its members have met, and died before they replied
    after = feedback_after_round(
        round_of(before),
        [met, alone],
        [reply_of(0, (0, 1), "new 0"), asked_again, reply_of(2, (2,), "")],
    )
    assert {group: each.sha256 for group, each in after.items()} == {0: "new 0", 2: "owed 2"}


# --------------------------------------------------------------------------------------------------- in one process
def one_process(
    rounds: int | None = None,
    state: dict[str, Any] | None = None,
    done: int = 0,
    arrays: ArrayRecord | None = None,
    norm: bool = True,
    folder: Path | None = None,
    **changes: Any,
) -> tuple[SoCFlow, ArrayRecord]:
    strategy = compressed(**changes)
    if state is not None:
        strategy.resume_from(done, **state)
    made = make_client_app(
        lambda context: ring_app.network(norm=norm),
        ring_app.part,
        FP32Trainer(optimizer=sgd(0.05)),
        state_folder=lambda context: folder,
    )
    with LocalGrid(made, 4, num_workers=0) as grid:
        result = strategy.start(
            GroupGrid(grid),
            arrays or ring_app.initial(norm=norm),
            num_rounds=rounds or strategy.num_rounds,
            timeout=120,
        )
    return strategy, result.arrays


def compressed(compression: str = "int8", **changes: Any) -> SoCFlow:
    return ring_app.strategy(
        ring_app.cluster(),
        **{"leaders": "ring", "leader_compression": compression, "interval_epochs": 0.5, **changes},
    )


def assert_same_bits(ours: ArrayRecord, reference: ArrayRecord) -> None:
    assert [
        name
        for name in reference
        if ours[name].numpy().tobytes() != reference[name].numpy().tobytes()
    ] == []


@pytest.mark.parametrize("compression", ["fp16", "int8", "int4"])
def test_groups_in_one_process_stay_near_the_uncompressed_training(compression: str) -> None:
    _, exact = one_process(compression="none")
    strategy, ours = one_process(compression=compression)
    assert all(not report.events for report in strategy.reports)
    differences = [np.abs(ours[name].numpy() - exact[name].numpy()).max() for name in exact]
    assert 0.0 < max(differences) < (0.05 if compression == "int4" else 0.02)
    assert bool(strategy.state["feedback"]) == (compression != "fp16")


def test_a_training_that_goes_on_from_its_state_has_the_same_weights(tmp_path: Path) -> None:
    _, whole = one_process(norm=False)
    half, arrays = one_process(norm=False, rounds=2, folder=tmp_path)
    state = half.state
    assert {"0/values", "1/values"} <= set(state["feedback"])
    _, resumed = one_process(norm=False, state=state, done=2, arrays=arrays, folder=tmp_path)
    assert_same_bits(resumed, whole)
    _, without = one_process(
        norm=False, state={**state, "feedback": {}}, done=2, arrays=arrays, folder=tmp_path
    )
    assert any(without[name].numpy().tobytes() != whole[name].numpy().tobytes() for name in whole)


def test_an_outer_step_takes_the_compressed_mean() -> None:
    strategy, ours = one_process(outer=FedAdam(eta=0.01, fraction_evaluate=0.0))
    _, exact = one_process(outer=FedAdam(eta=0.01, fraction_evaluate=0.0), compression="none")
    assert (
        strategy.method.describe().exchanges.leaders.to_document()["leader_compression"] == "int8"
    )
    assert 0.0 < max(np.abs(ours[name].numpy() - exact[name].numpy()).max() for name in exact) < 0.1


# -------------------------------------------------------------------------------------------------------- refusals
class NoTraining(FakeGrid):
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        assert not list(messages), "sent"
        return []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"leaders": "star"}, "leader_compression"),
        ({"leader_compression": "int4", "leaders": "tree"}, "leader_compression"),
        ({"leader_compression": 8}, "leader_compression"),
        ({"outer": FedMedian(), "leaders": "auto"}, "outer"),
        ({"outer": Krum(num_malicious_nodes=0), "leaders": "auto"}, "outer"),
    ],
)
def test_what_cannot_be_compressed_is_refused_before_anything_starts(
    changes: dict[str, Any], says: str
) -> None:
    refused(lambda: compressed(**changes), says)


def test_a_strategy_around_it_is_refused_before_anything_is_sent() -> None:
    inner = socflow(
        outer=FedAvg(), exchange=ExchangeSettings(leaders="ring", leader_compression="int8")
    )
    refused(lambda: private(inner).start(cast(Grid, NoTraining()), model(), num_rounds=2), "int8")


# ------------------------------------------------------------------------------------------------- real processes
SHAPE: dict[str, Any] = {
    "leaders": "ring",
    "leader_compression": "int8",
    "num_epochs": 1,
    "interval_epochs": 0.5,
}
RACK: dict[str, Any] = {"boards": 3, "socs_per_board": 2, "num_groups": 3, "transport": "grpc"}


def summed_like_rings(
    rounds: int | None = None, **shape: Any
) -> tuple[ArrayRecord, dict[int, str]]:
    """Return the weights of one process that sums in the order of rings, and digests of what groups owe."""
    strategy = ring_app.strategy(ring_app.cluster(3, 2), 3, **shape)
    config = {"norm": False, "member-passes": "ring"}
    with LocalGrid(ring_app.client_app(), 6, run_config=config, num_workers=0) as grid:
        result = strategy.start(
            GroupGrid(grid),
            ring_app.initial(),
            num_rounds=rounds or strategy.num_rounds,
            timeout=120,
        )
    owed = from_arrays(strategy.state["feedback"])
    return result.arrays, {group: feedback_digest(each.values) for group, each in owed.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "int4"])
def test_rings_of_processes_have_the_bits_of_one_process(compression: str, tmp_path: Path) -> None:
    shape = {**SHAPE, "interval_epochs": 0.25, "leader_compression": compression}
    reference, owed = summed_like_rings(**shape)
    with FaultyRun(tmp_path, step_s=0.0, **RACK, **shape) as run:
        assert_same_bits(run.result(), reference)
        assert run.events == []
        assert {
            group: each.sha256
            for group, each in from_arrays(run.strategy.state["feedback"]).items()
        } == owed
    assert len(owed) == (3 if compression in ("int8", "int4") else 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["meeting", "met"])
@pytest.mark.parametrize("socs", [(0,), (2,), (0, 2)], ids=str)
def test_a_leader_that_is_lost_in_the_exchange_leaves_the_feedback_to_its_group(
    phase: str, socs: tuple[int, ...], tmp_path: Path
) -> None:
    """In the round in which it is lost all bits are those of one process, and so are the next leader's."""
    _, expected = summed_like_rings(rounds=1, **SHAPE)
    seen: list[dict[int, str]] = []

    def evaluate(run: FaultyRun, server_round: int) -> None:
        seen.append(
            {
                group: each.sha256
                for group, each in from_arrays(run.strategy.state["feedback"]).items()
            }
        )

    with FaultyRun(
        tmp_path,
        of_soc={soc: {"dies-in": phase} for soc in socs},
        step_s=0.02,
        evaluate=evaluate,
        **RACK,
        **SHAPE,
    ) as run:
        run.result()
        run.check_weights(
            2e-3
        )  # a step more or less of eight bits, where a smaller group sums in another order
        run.check_ledger({server_round: set(socs) for server_round in (1, 2)})
        lost = {
            event.group_id for event in run.events if "up to half a step, is lost" in event.text
        }
    # If all others have left with the sum before the next member comes, it knows the sum from the hub alone.
    assert seen[1] == {group: sha256 for group, sha256 in expected.items() if group not in lost}
    assert lost <= ({soc // 2 for soc in socs} if phase == "met" else set())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rings_of_processes_go_on_from_states_in_files(tmp_path: Path) -> None:
    def train(
        folder: Path,
        rounds: int,
        state: dict[str, Any] | None = None,
        done: int = 0,
        arrays: ArrayRecord | None = None,
    ) -> tuple[SoCFlow, ArrayRecord]:
        strategy = compressed()
        if state is not None:
            strategy.resume_from(
                done,
                **json.loads(
                    json.dumps(
                        {
                            key: value
                            for key, value in state.items()
                            if key not in ("outer", "servers", "feedback")
                        }
                    )
                ),
                feedback=state["feedback"],
            )
        with ProcessGrid(
            ring_app.client_app,
            ring_app.node_configs(ring_app.cluster()),
            run_config={"states": str(folder)},
        ) as grid:
            result = strategy.start(
                GroupGrid(grid), arrays or ring_app.initial(), num_rounds=rounds, timeout=120
            )
        assert all(not report.events for report in strategy.reports)
        return strategy, result.arrays

    _, whole = train(tmp_path / "whole", 4)
    half, arrays = train(tmp_path / "half", 2)
    train(
        tmp_path / "half", 3, half.state, 2, arrays
    )  # went further, and its hub was lost before it wrote that down
    _, resumed = train(tmp_path / "half", 4, half.state, 2, arrays)
    assert_same_bits(resumed, whole)
