"""The client of a split training: what it is asked, what it stateful between rounds, and weights of local training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from socflower.clients.saved_training import StateFiles
from socflower.clients.split.app import make_split_client_app
from socflower.clients.split.in_process import SplitSettings
from socflower.clients.split.remote_cloud import cloud_link
from socflower.clients.split.saved_halves import SplitState
from socflower.cluster import parse_cluster
from socflower.edgecloud.plan.timeline_actions import decode_actions, encode_actions
from socflower.edgecloud.split_program import LayeredProgram, SplitProgram
from socflower.errors import ConfigError
from socflower.strategies.split_replay import SplitReplay
from socflower.wire.message_keys import EVENTS
from socflower.wire.split_message_keys import CLOUD_MODES, SPLIT, SplitReport, SplitTask
from tests.clients.split.models import (
    BATCHES_PER_EPOCH,
    SEED,
    ThreadGrid,
    codes_of,
    differing,
    generator,
    joined,
    layered,
    local_training,
    parties_of,
    samples_of,
    task_settings,
)
from tests.one_line import refused
from tests.split_edges import simulate_split

NUM_BATCHES = 2 * BATCHES_PER_EPOCH

pytestmark = pytest.mark.usefixtures("one_run_and_thread")


def client_app(program: SplitProgram, **settings: Any) -> ClientApp:
    return make_split_client_app(
        lambda context: program,
        lambda context, party, num_parties: samples_of(program, party),
        cloud_data_fn=(lambda context, party, num_parties: codes_of(program, party, num_parties))
        if program.is_reverse
        else None,
        **settings,
    )


def train(
    program: SplitProgram,
    num_parties: int = 1,
    *,
    mode: Any = "own",
    cut: int | None = 0,
    num_epochs: int = 2,
    grid: ThreadGrid | None = None,
    strategy_settings: dict[str, Any] | None = None,
    **party_settings: Any,
) -> tuple[dict[str, NDArray[Any]], SplitReplay]:
    """Train by Flower's messages with no cloud, and return the whole model's weights."""
    strategy = SplitReplay(
        cluster=parse_cluster({"boards": [4]}),
        parties=parties_of(program, num_parties, cut=cut, **party_settings),
        edge_names=program.edge_names,
        batches_per_epoch=BATCHES_PER_EPOCH,
        num_epochs=num_epochs,
        mode=mode,
        reverse=program.is_reverse,
        seed=SEED,
        fingerprint=program.fingerprint(),
        **(strategy_settings or {}),
    )
    grid = grid or ThreadGrid([client_app(program) for _ in range(num_parties)])
    result = strategy.start(
        grid,
        ArrayRecord(program.model().state_dict()),  # type: ignore[arg-type]
        num_rounds=strategy.num_rounds,
        timeout=60,
    )
    return {name: array.numpy() for name, array in result.arrays.items()}, strategy


# --------------------------------------------------------------------------------------- weights of local training
@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("name", "cut"), [("lenet5", 0), ("lenet5", 2), ("lenet5", None), ("resnet8", 1)]
)
def test_at_k_0_without_compression_two_rounds_give_the_weights_of_local_training(
    name: str, cut: int | None
) -> None:
    program = layered(name)
    arrays, strategy = train(program, cut=cut)
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []
    assert [report.events for report in strategy.reports] == [(), ()]


def test_joined_parties_at_k_0_give_the_weights_of_the_undivided_model() -> None:
    program = joined()
    arrays, _ = train(program, 2, mode="joined")
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []


def test_a_reverse_split_at_k_0_gives_the_weights_of_the_undivided_model() -> None:
    program = generator()
    arrays, _ = train(program, cut=1)
    assert differing(arrays, local_training(program, NUM_BATCHES)) == []


def test_a_window_lets_gradients_come_back_stale_and_equal_seeds_give_equal_weights() -> None:
    program = layered()
    stale, strategy = train(program, window=3)
    assert differing(stale, local_training(program, NUM_BATCHES))
    assert 0 < max(strategy.reports[0].timeline.parties[0].staleness) <= 3
    assert differing(train(program, window=3)[0], stale) == []


def test_own_halves_are_averaged_after_each_round_as_clients_of_fed_avg() -> None:
    """Two edges, one round, no momentum carried over: the mean of two trainings, by samples."""
    program = layered()
    arrays, _ = train(program, 2, num_epochs=1)
    alone = [
        train(program, num_epochs=1, grid=ThreadGrid([client_app_of_party(program, party)]))[0]
        for party in (0, 1)
    ]
    for name, array in arrays.items():
        expected = (24.0 * alone[0][name] + 28.0 * alone[1][name]) / 52.0
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


def client_app_of_party(program: LayeredProgram, party: int) -> ClientApp:
    """Return an edge that takes itself for party 0 and holds what `party` does, in that one's order."""
    samples = samples_of(program, party)
    app = make_split_client_app(lambda context: program, lambda context, _, __: samples)

    def keyed(message: Message, context: Context) -> Message:
        task = SplitTask.decode(message.content.config_records[SPLIT])
        message.content[SPLIT] = ConfigRecord(
            replace(
                task, parties=(party,), num_parties=2, actions=with_party(task.actions, party)
            ).encode()
        )
        return app(message, context)

    return keyed  # type: ignore[return-value]


def with_party(actions: bytes, party: int) -> bytes:
    return encode_actions(replace(action, party=party) for action in decode_actions(actions))


def test_edges_that_take_turns_share_one_back_half_and_their_fronts_are_averaged() -> None:
    program = layered()
    arrays, _ = train(program, 3, mode="turns", num_epochs=1)
    assert set(arrays) == set(program.model().state_dict())
    assert differing(train(program, 3, mode="turns", num_epochs=1)[0], arrays) == []
    assert differing(arrays, train(program, 3, mode="own", num_epochs=1)[0])


# --------------------------------------------------------------------------------------------------------- the task
TASKS = st.integers(1, 4).flatmap(
    lambda count: st.builds(
        lambda **settings: SplitTask(**settings),
        parties=st.just(tuple(range(count))),
        num_parties=st.just(count),
        mode=st.sampled_from(CLOUD_MODES),
        reverse=st.booleans(),
        first_batch=st.integers(0, 9),
        num_batches=st.integers(1, 9),
        total_batches=st.just(18),
        batches_per_epoch=st.integers(1, 9),
        seed=st.integers(0, 1 << 31),
        cuts=st.just((0,) * count),
        bits=st.just((8,) * count),
        windows=st.just((3,) * count),
        gradient_bits=st.just(32),
        actions=st.binary(max_size=40),
        address=st.sampled_from(["", "cloud:1"]),
        run=st.text("abc", max_size=4),
        session_first=st.integers(0, 9),
        token=st.just("ab"),
        fingerprint=st.text("0123", max_size=4),
    )
)


@settings(max_examples=40)
@given(TASKS)
def test_a_task_is_the_same_after_its_way_through_a_flower_record(task: SplitTask) -> None:
    assert SplitTask.decode(ConfigRecord(task.encode())) == task


def test_a_report_is_the_same_after_its_way_through_a_flower_record() -> None:
    report = SplitReport(
        cut=2,
        bits=8,
        duration_s=1.5,
        compute_s=0.5,
        up_bytes=3,
        down_bytes=4,
        staleness=(1, 2),
        reconnects=1,
        events=("a", "b"),
    )
    assert SplitReport.decode(ConfigRecord(report.encode())) == report


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "both"}, "mode = 'both'"),
        ({"cuts": ()}, "need one of each for every party"),
        ({"parties": (0, 1)}, "2 parties, 1 cuts"),
        ({"first_batch": -1}, "-1"),
        ({"num_batches": 9}, "batches 0 to 9 of 8 do not exist"),
    ],
)
def test_a_task_that_cannot_be_is_one_line(changes: dict[str, Any], says: str) -> None:
    refused(lambda: SplitTask(**task_settings(**changes)), says)


def test_records_of_another_version_name_what_is_missing_or_too_much() -> None:
    record = SplitTask(**task_settings()).encode()
    missing = {key: value for key, value in record.items() if key != "windows"}
    for changed, says in (
        (missing, r"missing \['windows'\]"),
        ({**record, "new": 1}, r"unknown \['new'\]"),
    ):
        with pytest.raises(ConfigError, match=says):
            SplitTask.decode(ConfigRecord(changed))


# ------------------------------------------------------------------------------------------------------ bad messages
def ask(app: ClientApp, task: SplitTask | None, context: Context | None = None) -> Message:
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros(1, np.float32))}), "config": ConfigRecord({})}
    )
    if task is not None:
        content[SPLIT] = ConfigRecord(task.encode())
    return app(Message(content, 1, "train"), context or new_context())


def new_context(**node_config: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})


def test_a_message_of_another_strategy_is_refused() -> None:
    refused(lambda: ask(client_app(layered()), None), "socflower.SplitReplay")


def test_a_server_with_another_model_is_refused_before_anything_is_trained() -> None:
    task = SplitTask(**task_settings(fingerprint="f" * 64))
    refused(lambda: ask(client_app(layered()), task), "cut", "model")


def test_fewer_samples_than_batches_are_refused() -> None:
    refused(
        lambda: ask(client_app(layered()), SplitTask(**task_settings(batches_per_epoch=100))),
        "24",
        "100",
        "24 samples",
        "100 batches",
    )


def test_with_a_cloud_a_message_is_for_one_party() -> None:
    task = SplitTask(
        **task_settings(
            parties=(0, 1),
            num_parties=2,
            cuts=(0, 0),
            bits=(32, 32),
            windows=(0, 0),
            address="127.0.0.1:1",
        )
    )
    refused(lambda: ask(client_app(layered()), task), "parties")


def test_parties_whose_features_are_joined_have_one_cut() -> None:
    refused(lambda: joined().back(3), "cut")


def test_the_way_to_the_cloud_is_read_from_the_node_config(tmp_path: Path) -> None:
    assert cloud_link(new_context()).tls is None and cloud_link(new_context()).folder is None
    link = cloud_link(
        new_context(**{"cloud-ca": "ca.pem", "cloud-insecure": True, "cloud-folder": str(tmp_path)})
    )
    assert link.tls is not None and link.tls.ca == Path("ca.pem")
    assert (link.insecure, link.folder) == (True, tmp_path)
    refused(
        lambda: cloud_link(new_context(**{"cloud-certificate": "edge.pem"})), "certificate", "key"
    )


# ------------------------------------------------------------------------------------------------- between the rounds
def test_halves_are_kept_in_memory_between_rounds_and_a_new_node_begins_with_new_optimisers() -> (
    None
):
    """The second round's weights differ from local training where momentum is lost, and that is said."""
    program = layered()
    grid = ThreadGrid([client_app(program)])
    whole, _ = train(program, grid=grid)
    forgetful = ThreadGrid([client_app(program)])
    inner = forgetful._answer

    def answer(message: Message) -> Message:
        forgetful.contexts[message.metadata.dst_node_id].state = RecordDict()
        return inner(message)

    forgetful._answer = answer  # type: ignore[method-assign]
    lost, strategy = train(program, grid=forgetful)
    assert differing(lost, whole)
    assert [[event.text for event in report.events] for report in strategy.reports] == [
        [],
        ["edge 0: nothing is left of the optimisers before batch 4; continued with new ones"],
    ]


def test_halves_that_are_kept_in_files_outlive_the_clients_process(tmp_path: Path) -> None:
    program = layered()
    expected, _ = train(program)
    grid = ThreadGrid([client_app(program, state_folder=lambda context: tmp_path)])
    inner = grid._answer

    def answer(message: Message) -> Message:
        grid.contexts[message.metadata.dst_node_id].state = RecordDict()
        return inner(message)

    grid._answer = answer  # type: ignore[method-assign]
    found, strategy = train(program, grid=grid)
    assert differing(found, expected) == [] and strategy.reports[-1].events == ()


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_a_state_is_what_was_kept_in_memory_as_in_files(
    tmp_path_factory: Any, halves: list[bytes]
) -> None:
    files = StateFiles(tmp_path_factory.mktemp("state"))
    context = new_context()
    first = SplitTask(**task_settings())
    second = replace(first, first_batch=4)
    SplitState(first, context, files).save(halves, [0])
    assert SplitState(second, context).read() == halves
    assert SplitState(second, new_context(), files).read() == halves
    assert SplitState(second, new_context()).read() is None
    assert SplitState(replace(second, total_batches=9), new_context(), files).read() is None


def test_a_state_of_another_place_is_not_used_and_a_new_training_forgets_all(
    tmp_path: Path,
) -> None:
    context, files = new_context(), StateFiles(tmp_path)
    first = SplitTask(**task_settings())
    SplitState(first, context, files).save([b"half"], [0])
    assert SplitState(replace(first, first_batch=3, num_batches=1), context, files).read() is None
    assert SplitState(first, context, files).read() is None
    assert SplitState(replace(first, total_batches=9, first_batch=4), context, files).read() is None


@pytest.mark.parametrize("changes", [{"cuts": (1,)}, {"cuts": (-1,)}, {"address": "127.0.0.1:1"}])
def test_halves_that_were_cut_elsewhere_or_had_another_other_half_are_not_taken(
    changes: dict[str, Any],
) -> None:
    context, first = new_context(), SplitTask(**task_settings())
    SplitState(first, context).save([b"half"], [0])
    assert SplitState(replace(first, first_batch=4), context).read() == [b"half"]
    assert SplitState(replace(first, first_batch=4, **changes), context).read() is None


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    first = SplitTask(**task_settings())
    SplitState(first, new_context(), StateFiles(tmp_path)).save([b"half" * 100], [0])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert (
        SplitState(replace(first, first_batch=4), new_context(), StateFiles(tmp_path)).read()
        is None
    )


def test_changes_of_features_have_no_error_feedback_on_any_engine() -> None:
    """A real link left it out without a word, and one process did not."""
    refused(
        lambda: SplitSettings(feedback="rank-one", delta_bytes=1024),
        "rank-one",
        "delta_bytes",
        "1024",
    )
    SplitSettings(feedback="rank-one")
    SplitSettings(delta_bytes=1024)


def test_events_of_a_client_travel_beside_its_report() -> None:
    program = layered()
    grid = ThreadGrid([client_app(program, settings_fn=lambda context: SplitSettings())])
    task = SplitTask(**task_settings(first_batch=4, actions=one_by_one(4, 8)))
    content = RecordDict(
        {
            "arrays": ArrayRecord(program.model().state_dict()),
            "config": ConfigRecord({}),
            SPLIT: ConfigRecord(task.encode()),
        }
    )
    (reply,) = grid.send_and_receive([Message(content, 10, "train")])
    assert reply.content.config_records[EVENTS]["texts"] == [
        "nothing is left of the optimisers before batch 4; continued with new ones"
    ]


def one_by_one(first: int, stop: int) -> bytes:
    return encode_actions(simulate_split(parties_of(layered()), stop - first, first).actions)
