"""A ring of real processes, one of which the kernel makes slow: shares follow what each can do, and nothing is lost."""

import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from benchmarks.rebalancing_rack.plan import RingRun, model, trainer
from benchmarks.rebalancing_rack.rack import ThrottledRack
from socflower.training.group import train_group
from tests.cpu_quota import missing, quota, quotas
from tests.peers.peers import free_addresses

NO_QUOTA = missing()
pytestmark = pytest.mark.skipif(NO_QUOTA is not None, reason=str(NO_QUOTA))

SPIN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(flush=True)
input()
"""


def weights_of(trained: torch.nn.Module) -> np.ndarray:
    return np.concatenate(
        [parameter.detach().contiguous().numpy().ravel() for parameter in trained.parameters()]
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_shares_follow_quotas_and_weights_are_those_of_the_full_batch() -> None:
    """On a loaded machine the fast member may get less than its quota: half of it would still do."""
    with ThrottledRack([0.5, 0.1]) as rack:
        run = RingRun(
            transport="grpc",
            addresses=tuple(free_addresses(2)),
            batch_size=40,
            num_steps=12,
            rebalance_steps=1,
        )
        fast, slow = rack.train(run)
        assert [sum(shares) for shares in zip(fast.samples, slow.samples, strict=True)] == [40] * 12
        assert fast.samples[:4] == slow.samples[:4] == (20,) * 4
        assert fast.samples[-1] >= 2 * slow.samples[-1] > 0, (fast, slow)
        assert fast.rates == slow.rates
        assert fast.rates[0] > 2 * fast.rates[1]
        whole = model()
        before = weights_of(whole)
        train_group(whole, run.samples(), run.task(), trainer())
        assert np.abs(weights_of(whole) - before).max() > 1e-2
        for member in (fast, slow):
            np.testing.assert_allclose(
                np.load(member.weights), weights_of(whole), atol=1e-4, rtol=0
            )


def test_what_a_process_in_a_quota_starts_is_in_it_and_nothing_is_left() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline()
        child = psutil.Process(parent.pid).children()[0]
        try:
            with quotas([parent.pid], [0.2]) as (held,):
                inside = (held.folder / "cgroup.procs").read_text().split()
                assert {str(parent.pid), str(child.pid)} <= set(inside)
                held.set(0.1)
            assert not held.folder.exists()
            assert child.is_running()
        finally:
            child.kill()
            parent.kill()


def test_a_process_that_spins_uses_up_its_quota_and_no_more() -> None:
    with quota(cores=0.1) as held:
        spun = subprocess.run(
            held.command(
                [
                    sys.executable,
                    "-c",
                    (
                        "import time; began = time.perf_counter(); end = time.process_time() + 0.15\n"
                        "while time.process_time() < end: pass\n"
                        "print(time.perf_counter() - began)"
                    ),
                ]
            ),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert held.num_throttled() > 10
    assert (
        float(spun.stdout) > 0.5 * 0.15 / 0.1
    )  # however busy the machine is, it takes longer, not shorter
