"""Lines that break at any byte, and lines that are down for a while: no batch is lost, none is done twice."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from socflower.edgecloud.plan.cuts import SplitPlan
from socflower.edgecloud.runtime.front_loop import DecisionInput, FrontPlan
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.peers.resumable_stream import StreamLost
from tests.edgecloud.cloud.local import Cloud, plan, train
from tests.edgecloud.runtime.numpy_halves import Back, Front, same, targets
from tests.edgecloud.stream.breaking_line import BreakingLine
from tests.one_line import refused


@pytest.fixture(scope="module")
def shared() -> Iterator[Cloud]:
    with Cloud() as made:
        yield made


@pytest.mark.few_cells(5)
@pytest.mark.parametrize("seed", range(20))
def test_whenever_the_line_breaks_the_weights_are_those_of_local_training(
    shared: Cloud, seed: int
) -> None:
    """With K = 0; half of the lines move the cut meanwhile, and every fourth is a reverse split."""
    run_id, reverse = f"line{seed}", seed % 4 == 3
    shared.open(run_id, reverse=reverse)
    half: Any = Back(goal=lambda batch: targets(batch, 0)) if reverse else Front()

    def decide(now: DecisionInput) -> SplitPlan | None:
        return SplitPlan(cut=now.batch // 2 % 3) if seed % 2 == 0 else None

    # A greeting and what gRPC says itself are below 1 kB: every connection brings something, most break.
    with closing(BreakingLine(shared.port, seed=seed, mean_bytes=6000)) as line:
        how = plan(decide=decide)
        report = train(line.port, half, 15, how, run_id=run_id, give_up_s=60.0)
    assert reverse or half.applied == half.forwards == list(range(15))
    assert shared.trained(half, 15, run_id)
    assert report.num_rollbacks == 0 and line.num_connections >= report.num_streams


@pytest.mark.parametrize("seed", [1, 2])
def test_with_a_window_each_batch_is_done_once_in_order_on_a_breaking_line(
    shared: Cloud, seed: int
) -> None:
    run_id, front = f"window{seed}", Front()
    shared.open(run_id)
    with closing(BreakingLine(shared.port, seed=seed, mean_bytes=8000)) as line:
        report = train(line.port, front, 40, plan(4), run_id=run_id, give_up_s=60.0)
    assert front.applied == front.forwards == shared.half(run_id).steps == list(range(40))
    assert max(report.staleness.values()) <= 4 and report.peak_kept_messages <= 5


def test_a_line_that_is_down_for_a_while_is_waited_for(shared: Cloud) -> None:
    shared.open("down", settings={"pause_s": 0.01})
    front, begun = Front(), threading.Event()
    with closing(BreakingLine(shared.port)) as line:

        def interrupt() -> None:
            begun.wait(20)
            line.down()
            time.sleep(1.0)
            line.up()

        threading.Thread(target=interrupt, daemon=True).start()
        how = plan(progress=lambda done: begun.set())
        report = train(line.port, front, 40, how, run_id="down")
    assert report.num_streams == 2 and report.wait_s > 0.5
    assert shared.trained(front, 40, "down")


def after_3(act: Any) -> FrontPlan:
    return plan(progress=lambda done: act() if done.batch == 3 else None)


def test_a_line_that_stays_down_ends_in_a_line(shared: Cloud) -> None:
    shared.open("gone", settings={"pause_s": 0.01})
    with closing(BreakingLine(shared.port)) as line:
        for num_batches, how in ((4000, after_3(line.down)), (4, None)):
            refused(
                lambda num=num_batches, how=how: train(  # type: ignore[misc]
                    line.port, Front(), num, how, run_id="gone", give_up_s=0.4
                ),
                "run gone",
                f":{line.port}",
                "out of reach",
                error=StreamLost,
            )


def test_a_session_that_is_closed_meanwhile_is_not_dialled_again(shared: Cloud) -> None:
    shared.open("closed", settings={"pause_s": 0.01})
    how = after_3(lambda: shared.service._sessions.end("closed", forget=True))
    refused(
        lambda: train(shared.port, Front(), 4000, how, run_id="closed"),
        "run closed",
        error=SplitRefused,
    )


class Crash(Exception):
    pass


def crash(done: Any) -> None:
    if done.batch == 6:
        raise Crash


def test_a_joined_party_that_falls_out_brings_all_back_to_a_checkpoint(tmp_path: Path) -> None:
    """Party 1's edge is replaced by a new one, as after a crash: both go back, and end as if nothing had been."""
    fronts = [Front(seed=1), Front(seed=2, labels=False)]
    reports: dict[int, Any] = {}
    with Cloud(folder=tmp_path / "cloud") as cloud:
        cloud.open(num_parties=2, joined=True)

        def one(party: int, **options: Any) -> None:
            how, folder = plan(checkpoint_batches=4, **options), tmp_path / f"party{party}"
            reports[party] = train(cloud.port, fronts[party], 12, how, folder=folder, party=party)

        thread = threading.Thread(target=one, args=(0,))
        thread.start()
        with pytest.raises(Crash):
            one(1, progress=crash)
        fronts[1] = Front(seed=2, labels=False)
        one(1)
        thread.join(30)
        assert reports[1].first_batch == 4 and reports[0].num_rollbacks >= 1
        alone, back = [Front(seed=1), Front(seed=2)], Back()
        for batch in range(12):
            parts = [front.forward(batch, keep_graph=True) for front in alone]
            gradients, _ = back.step(batch, parts, alone[0].labels(batch))
            for front, gradient in zip(alone, gradients, strict=True):
                front.apply(batch, gradient)
        assert same(cloud.weights(), wanted=back.weights())
        for ours, theirs in zip(fronts, alone, strict=True):
            assert same(ours.weights(), wanted=theirs.weights())
