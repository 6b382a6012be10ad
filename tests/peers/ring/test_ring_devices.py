"""Rings of members with accelerators: gradients go through the host, and the weights are those of CPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from socflower.peers.collective import PeerLost
from socflower.peers.ring.bucket_exchange import BucketExchange
from socflower.training.fp32 import FP32Session
from tests.fake_device import fake_device  # noqa: F401 - a fixture
from tests.peers.ring.test_member import Died, Members, nothing

pytestmark = pytest.mark.usefixtures("fake_device")
DEVICES = ("fake", "cpu", "auto")


def weights(members: Members, rank: int) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in members.models[rank].state_dict().values()]


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": True, "own_data": True},
        {"num_buckets": 3, "frozen": True},
        {"compression": "dgc"},
    ],
    ids=str,
)
def test_members_on_any_devices_train_what_members_on_cpus_do(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = Members(3, monkeypatch, nothing, devices=DEVICES, **settings)
    ours.check()
    expected = Members(3, monkeypatch, nothing, **settings)
    for rank in range(3):
        assert next(ours.models[rank].parameters()).device.type == ("cpu" if rank == 1 else "fake")
        assert all(map(torch.equal, weights(ours, rank), weights(expected, rank)))
    report = ours.ends[0].devices
    assert (
        report is not None
        and report.devices == ("fake:0", "cpu", "fake:0")
        and report.socs == (0, 1, 2)
    )
    assert ours.ends[0].mean_loss == expected.ends[0].mean_loss


def test_a_ring_goes_on_when_a_member_with_an_accelerator_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strike(rank: int, generation: int, operation: str, number: int) -> None:
        if (rank, generation, operation, number) == (1, 0, "all_reduce", 3):
            raise Died

    # An exception in a backward pass, as of the poll at each gradient, ends the process on a device whose guard is
    # written in Python: torch unwinds it by a call that such guards do not have. So all are sent after the pass.
    monkeypatch.setattr(BucketExchange, "_on_gradient", lambda *_: None)
    members = Members(3, monkeypatch, strike, devices=("cpu", "fake", "fake"))
    members.check()
    assert [len(end.outcome.recoveries_s) for end in members.ends.values()] == [1, 1]


def rounding(monkeypatch: pytest.MonkeyPatch, differs: Callable[[FP32Session], bool]) -> None:
    """Let the weights of some members differ in their last bits after each step."""
    apply = FP32Session.apply

    def rounded(session: FP32Session) -> None:
        apply(session)
        if differs(session):
            with torch.no_grad():
                for parameter in session._model.parameters():
                    parameter.mul_(1.0 + 2**-23)

    monkeypatch.setattr(FP32Session, "apply", rounded)


def test_members_that_round_otherwise_end_with_the_weights_of_the_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounding(monkeypatch, lambda session: session._device.type == "fake")
    members = Members(2, monkeypatch, nothing, devices=("fake", "cpu"))
    members.check()
    alone = Members(1, monkeypatch, nothing, devices=("fake",))
    assert members.ends[0].outcome.answers and not members.ends[1].outcome.answers
    torch.testing.assert_close(weights(members, 1), weights(alone, 0), rtol=1e-4, atol=1e-6)


def test_equal_devices_with_other_weights_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[FP32Session] = []
    rounding(monkeypatch, lambda session: sessions.append(session) or session is not sessions[0])
    with pytest.raises(
        (RuntimeError, PeerLost), match="its members have come to different weights"
    ):
        dict(Members(2, monkeypatch, nothing, devices=("fake", "fake")).ends)
