"""Leaders sum their models in a ring: what comes of it, and who meets whom when some are lost; all in this process."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from socflower.hierarchy.averaging import weighted_average
from socflower.peers.collective import Collective, PeerLost, Poll
from socflower.peers.leaders import model_exchange as leader_exchange
from socflower.peers.leaders.leader_port import LeaderPort
from socflower.peers.leaders.model_changes import ChangeCompression
from socflower.peers.leaders.model_exchange import (
    GroupsModel,
    LeaderMeeting,
    exchange_in_process,
    pack_model,
    unpack_model,
)
from socflower.peers.transports.port import RingPort
from tests.peers.peers import TOKEN, free_addresses

WAIT_S = 60.0
FLOATS = ("float32", "float64", "float16", "complex64")


def model(seed: int, group: int, *, samples: float = 1.0, num_values: int = 7) -> GroupsModel:
    generator = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {
        dtype: generator.normal(size=(num_values, 2)).astype(dtype) for dtype in FLOATS
    }
    arrays["counter"] = np.array(seed % 97, np.int64)
    arrays["empty"] = np.zeros((0, 3), np.float32)
    return GroupsModel(arrays=arrays, samples=samples, groups=(group,))


def summed_in_order(models: Sequence[GroupsModel], name: str) -> NDArray[Any]:
    """Return the sum of a float32 tensor that is the whole buffer, part by part, from the part's own member on."""
    total = sum(each.samples for each in models)
    rows = [
        (each.arrays[name].astype(np.float64) * (each.samples / total)).astype(np.float32).ravel()
        for each in models
    ]
    size, result = len(models), np.empty_like(rows[0])
    for part in range(size):
        where = slice(len(result) * part // size, len(result) * (part + 1) // size)
        own = rows[part][where]
        for step in range(1, size):
            own = own + rows[(part + step) % size][where]
        result[where] = own
    return result.reshape(models[0].arrays[name].shape)


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 6), seed=st.integers(0, 10**6), num_values=st.integers(0, 9))
def test_the_mean_is_that_by_samples_in_the_order_of_the_plan(
    size: int, seed: int, num_values: int
) -> None:
    models = [
        model(seed + group, group, samples=1.0 + (seed + group) % 5, num_values=num_values)
        for group in range(size)
    ]
    mean = exchange_in_process(models)
    assert mean.groups == tuple(range(size))
    assert mean.samples == sum(each.samples for each in models)
    expected = weighted_average([each.arrays for each in models], [each.samples for each in models])
    assert list(mean.arrays) == list(expected)
    for name, array in expected.items():
        assert mean.arrays[name].dtype == array.dtype
        tolerance = 2e-3 if name == "float16" else 1e-6 if name != "float64" else 1e-14
        np.testing.assert_allclose(mean.arrays[name], array, atol=tolerance, rtol=tolerance)
    assert np.array_equal(mean.arrays["counter"], expected["counter"])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_order_of_the_sum_is_the_rings(size: int) -> None:
    models = [
        GroupsModel(
            arrays={"w": np.random.default_rng(group).normal(size=101).astype(np.float32)},
            samples=3.0 + group,
            groups=(group,),
        )
        for group in range(size)
    ]
    assert np.array_equal(exchange_in_process(models).arrays["w"], summed_in_order(models, "w"))


def test_a_model_of_one_group_stays_as_it_is() -> None:
    own = model(1, 4, samples=7.0)
    mean = exchange_in_process([own])
    assert mean.groups == (4,)
    assert all(np.array_equal(mean.arrays[name], own.arrays[name]) for name in own.arrays)


@pytest.mark.parametrize("spoil", ["nan", "no samples"])
def test_a_model_that_is_of_no_use_is_left_out(spoil: str) -> None:
    models = [model(seed, seed, samples=2.0) for seed in range(3)]
    if spoil == "nan":
        models[1].arrays["float32"][0, 0] = np.nan
    else:
        models[1] = model(1, 1, samples=0.0)
    mean = exchange_in_process(models)
    assert mean.groups == (0, 2)
    expected = weighted_average([models[0].arrays, models[2].arrays], [2.0, 2.0])
    np.testing.assert_allclose(mean.arrays["float32"], expected["float32"], atol=1e-6)
    assert mean.arrays["counter"] == expected["counter"]


def test_models_with_other_tensors_stay_apart() -> None:
    mean = exchange_in_process([model(0, 0), model(1, 1, num_values=8)])
    assert mean.groups == (0,)


def test_models_travel_as_they_are() -> None:
    sent = GroupsModel(
        arrays={"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, samples=12.5, groups=(3, 0)
    )
    got = unpack_model(pack_model(sent))
    assert (got.samples, got.groups) == (12.5, (3, 0))
    assert np.array_equal(got.arrays["w"], sent.arrays["w"])


class Rack:
    """Three groups of two members, each with its port; members 2g and 2g + 1 are of group g."""

    groups = (0, 1, 2)

    def __init__(self) -> None:
        self._addresses = free_addresses(2 * len(self.groups))
        self._ports: dict[int, RingPort] = {}
        self._threads = ThreadPoolExecutor(12)
        self._dead: set[int] = set()
        self.lines: dict[int, list[str]] = {}
        for rank in range(len(self._addresses)):
            self.open(rank)

    def open(self, rank: int) -> None:
        self._dead.discard(rank)
        self._ports[rank] = RingPort(
            self._addresses[rank],
            rank=rank,
            addresses=self._addresses,
            token=TOKEN,
            tls=None,
            heartbeat_s=4.0,
        )

    def meet(self, member: int, *, rendezvous_s: float = WAIT_S) -> Future[GroupsModel]:
        """Let a member bring its group's model, which is all of the group's number."""
        group = member // 2
        meeting = LeaderMeeting(
            LeaderPort(
                self._ports[member], group, {each: (2 * each, 2 * each + 1) for each in self.groups}
            ),
            self.groups,
            heartbeat_s=4.0,
            rendezvous_until_s=time.monotonic() + rendezvous_s,
        )
        self.lines[member] = meeting.log_lines

        def poll() -> None:
            if member in self._dead:
                raise RuntimeError("dead")

        own = GroupsModel(
            arrays={"w": np.full(1000, float(group), np.float32)}, samples=1.0, groups=(group,)
        )
        return self._threads.submit(meeting.exchange, own, poll)

    def die(self, *members: int) -> None:
        for member in members:
            self._dead.add(member)
            self._ports[member].close()

    def close(self) -> None:
        self.die(*self._ports)
        self._threads.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def rack() -> Iterator[Rack]:
    rack = Rack()
    yield rack
    rack.close()


def means(futures: Sequence[Future[GroupsModel]]) -> list[tuple[tuple[int, ...], float]]:
    found = [future.result(timeout=WAIT_S) for future in futures]
    return [(each.groups, float(each.arrays["w"][0])) for each in found]


def test_leaders_meet(rack: Rack) -> None:
    assert means([rack.meet(member) for member in (4, 0, 2)]) == [((0, 1, 2), 1.0)] * 3
    assert not any(rack.lines.values())


@pytest.mark.parametrize("group", [0, 1, 2])
def test_another_member_takes_the_place_of_a_leader_that_is_gone(rack: Rack, group: int) -> None:
    others = [rack.meet(2 * each) for each in rack.groups if each != group]
    time.sleep(0.5)
    rack.die(2 * group)
    assert not any(other.done() for other in others)  # its deputy lives
    assert means([*others, rack.meet(2 * group + 1)]) == [((0, 1, 2), 1.0)] * 3


@pytest.mark.parametrize("group", [0, 2])
def test_a_group_of_which_nobody_lives_is_left_out(rack: Rack, group: int) -> None:
    rack.die(2 * group, 2 * group + 1)
    others = [each for each in rack.groups if each != group]
    expected = (tuple(others), sum(others) / 2)
    assert means([rack.meet(2 * each, rendezvous_s=1.0) for each in others]) == [expected] * 2
    assert any(
        f"group {group} did not come" in line for lines in rack.lines.values() for line in lines
    )


def test_a_group_that_still_trains_is_waited_for_longer_than_the_rendezvous(rack: Rack) -> None:
    others = [rack.meet(member, rendezvous_s=0.2) for member in (0, 2)]
    time.sleep(2.0)
    assert not any(other.done() for other in others)
    assert means([*others, rack.meet(4)]) == [((0, 1, 2), 1.0)] * 3


@pytest.mark.parametrize("struck", [0, 1, 2])
def test_a_sum_that_only_some_have_got_is_not_made_again(
    rack: Rack,
    monkeypatch: pytest.MonkeyPatch,
    struck: int,
) -> None:
    """A leader dies with the sum, and one of the others has not got it."""
    exchange, lacking = leader_exchange.exchange_models, (struck + 1) % 3

    def exchange_struck(
        ring: Collective,
        own: GroupsModel,
        poll: Poll,
        changes: ChangeCompression | None,
    ) -> GroupsModel:
        mean = exchange(ring, own, poll, changes)
        monkeypatch.setattr(leader_exchange, "exchange_models", exchange)
        if own.groups == (struck,):
            rack.die(2 * struck)
            raise RuntimeError("dead")
        if own.groups == (lacking,):
            raise PeerLost("the sum has not come")
        return mean

    monkeypatch.setattr(leader_exchange, "exchange_models", exchange_struck)
    leaders = {group: rack.meet(2 * group) for group in rack.groups}
    assert isinstance(leaders.pop(struck).exception(timeout=WAIT_S), RuntimeError)
    assert means([rack.meet(2 * struck + 1), *leaders.values()]) == [((0, 1, 2), 1.0)] * 3


@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_that_comes_when_all_others_are_done_is_given_their_mean(
    rack: Rack, group: int
) -> None:
    means([rack.meet(2 * each) for each in rack.groups])
    rack.die(2 * group)
    assert means([rack.meet(2 * group + 1)]) == [((0, 1, 2), 1.0)]


def test_one_that_the_others_have_not_waited_for_keeps_its_own(rack: Rack) -> None:
    """So its update is not lost: the hub gets it beside the others' mean."""
    rack.die(2, 3)
    assert means([rack.meet(member, rendezvous_s=1.0) for member in (0, 4)]) == [((0, 2), 1.0)] * 2
    rack.open(3)
    assert means([rack.meet(3)]) == [((1,), 1.0)]


def test_leaders_keep_a_constant_that_is_not_finite() -> None:
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)

    def group(number: int, weight: float) -> GroupsModel:
        return GroupsModel(
            arrays={"mask": mask, "w": np.full(3, weight, np.float32)},
            samples=1.0,
            groups=(number,),
            began_with={"mask": mask},
        )

    mean = exchange_in_process([group(0, 1.0), group(1, 3.0), group(2, np.nan)])
    assert mean.groups == (0, 1)
    np.testing.assert_array_equal(mean.arrays["mask"], mask)
    np.testing.assert_array_equal(mean.arrays["w"], np.full(3, 2.0, np.float32))
