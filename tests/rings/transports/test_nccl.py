"""Rings of GPUs, with gloo on a fake device in NCCL's place: what is summed where, who chooses it, and how it ends."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.rings import member as ring_member
from socflower.rings.collective import PeerLost, no_poll
from socflower.rings.gradient_exchange import GradientExchange
from socflower.rings.settings import RingSettings, transport_of_ring
from socflower.rings.transports.grpc import GrpcRing
from socflower.rings.transports.in_process import in_process_rings
from socflower.rings.transports.nccl import NcclRing, gpu_identity
from socflower.wire.message_keys import COMPRESSIONS, TRANSPORTS
from tests.fake_device import OnFake, fake_device  # noqa: F401 - a fixture
from tests.rings.test_member import Members, model, nothing
from tests.rings.transport_contract import on_all, ring_of_threads, wait_with_timeout


class OnDevice:
    """A process group whose buffers are on the fake device, as NCCL's are on GPUs."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._group, self.aborted, self.num_sums = dist.ProcessGroupGloo(store, rank, size), False, 0

    def allreduce(self, buffers: Sequence[torch.Tensor]) -> Any:
        assert all(isinstance(buffer, OnFake) for buffer in buffers)
        self.num_sums += 1
        return self._group.allreduce([buffer.held for buffer in buffers])

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, fake_device: str) -> list[OnDevice]:  # noqa: F811
    """The groups that stand for NCCL's, of all rings that are opened."""
    made: list[OnDevice] = []

    def group(store: Any, rank: int, size: int) -> OnDevice:
        made.append(OnDevice(store, rank, size))
        return made[-1]

    def ring(port: Any, ranks: Any, generation: int, heartbeat_s: float, device: Any = None) -> NcclRing:
        return NcclRing(port, ranks, generation, heartbeat_s, device or torch.device(fake_device), group)

    monkeypatch.setattr(ring_member, "NcclRing", ring)
    monkeypatch.setattr(ring_member, "GlooRing", ring)  # opened by the contract's threads, which know no device
    return made


def test_buffers_of_the_device_are_summed_there_and_others_on_the_cpu(groups: list[OnDevice]) -> None:
    with ring_of_threads("gloo", 2) as (_, rings):
        def reduce(ring: NcclRing) -> list[float]:
            buffers = [torch.full((5,), float(ring.rank + 1), device=where) for where in ("fake", "cpu")]
            for buffer in buffers:
                wait_with_timeout(ring.all_reduce(buffer))
            return [each.cpu().unique().item() for each in buffers]

        assert on_all(rings, reduce) == [[3.0, 3.0]] * 2
        assert {ring.transport for ring in rings} == {"nccl"}
        assert [group.num_sums for group in groups] == [2, 2]  # one of them connects the members
        pending = rings[0].all_reduce(torch.ones(3, device="fake"))
        rings[0].close()
        assert sum(group.aborted for group in groups) == 1
        with pytest.raises(PeerLost, match="has been left"):
            rings[0].all_reduce(torch.ones(3, device="fake"))
        del pending
        wait_with_timeout(rings[1].all_reduce(torch.ones(3, device="fake")))  # no group is destroyed amid a sum


def test_a_wait_for_the_device_ends_by_its_poll(groups: list[OnDevice]) -> None:
    class Enough(Exception):
        pass

    def poll() -> None:
        if time.monotonic() > until_s:
            raise Enough

    with ring_of_threads("gloo", 2) as (_, rings):
        on_all(rings, lambda ring: wait_with_timeout(ring.all_reduce(torch.ones(3, device="fake"))))
        until_s = time.monotonic() + 0.05
        with pytest.raises(Enough):
            rings[0].all_reduce(torch.ones(3, device="fake")).wait(poll)
        wait_with_timeout(rings[1].all_reduce(torch.ones(3, device="fake")))  # no group is destroyed amid a sum


class OnDeviceRing(GrpcRing):
    """A ring that sums buffers of the fake device, for members in one process, of which gloo allows only one."""

    num_sums = 0

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.reduces_on = "fake"

    def all_reduce(self, buffer: torch.Tensor) -> Any:
        OnDeviceRing.num_sums += isinstance(buffer, OnFake)
        return super().all_reduce(buffer.held if isinstance(buffer, OnFake) else buffer)


@pytest.mark.usefixtures("fake_device")
def test_members_train_with_gradients_that_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_member, "GrpcRing", OnDeviceRing)
    monkeypatch.setattr(OnDeviceRing, "num_sums", 0)
    members = Members(2, monkeypatch, nothing, devices=("fake", "auto"), num_buckets=2, norm=True)
    members.check()
    assert OnDeviceRing.num_sums == 2 * 2 * len(members.ledgers[0])


@pytest.mark.usefixtures("fake_device")
def test_a_member_without_the_device_is_refused_before_the_first_sum() -> None:
    rings = in_process_rings(2)
    for ring in rings:
        ring.reduces_on = "fake"

    def begin(ring: Any) -> str:
        exchange = GradientExchange(model() if ring.rank else model().to("fake"), 1)
        with pytest.raises(ConfigError) as refused:
            exchange.begin(ring, no_poll)
        return str(refused.value)

    for text in on_all(rings, begin):
        assert "its members differ" in text and "their devices" in text


@given(agreed=st.sampled_from(("gloo", "grpc", "grpc+tls", "in process")), asked=st.sampled_from(TRANSPORTS),
       compression=st.sampled_from(COMPRESSIONS),
       gpus=st.lists(st.sampled_from(("", "GPU-1", "GPU-2", "GPU-3")), min_size=1, max_size=4))
def test_a_ring_takes_nccl_only_where_each_member_has_a_gpu_of_its_own(
    agreed: str, asked: str, compression: str, gpus: list[str],
) -> None:
    chosen = transport_of_ring(agreed, RingSettings(transport=asked, compression=compression), gpus)
    own = 1 < len(gpus) == len({gpu for gpu in gpus if gpu})
    assert chosen == ("nccl" if own and (agreed, asked, compression) == ("gloo", "auto", "none") else agreed)


@pytest.mark.usefixtures("fake_device")
def test_a_node_without_nccl_offers_no_gpu() -> None:
    assert [gpu_identity(torch.device(kind)) for kind in ("cpu", "fake", "cuda:0")] == ["", "", ""]
