"""Traces: what Perfetto needs, row by row."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from socflower.cluster import HUB, Activity, TaskGraphBuilder
from socflower.sim import EventClock, Trace
from tests.one_line import refused
from tests.toy_clusters import toy_cluster


def written(trace: Trace, folder: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Spans by row name, and the document; checks what holds for every trace."""
    trace.write(folder / "trace.json")
    assert [path.name for path in folder.iterdir()] == ["trace.json"], "nothing temporary is left"
    document = json.loads((folder / "trace.json").read_text("utf-8"))
    events = document["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in {"X", "M", "C"}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault(names[event["pid"], event["tid"]], []).append(event)
    for row, spans in rows.items():
        for before, after in pairwise(spans):
            end = before["ts"] + before["dur"]
            assert end <= after["ts"] * (1 + 1e-9) + 1e-6, f"{row} overlaps itself"
    return rows, document


def busy_graph() -> TaskGraphBuilder:
    b = TaskGraphBuilder()
    b.compute("compute", 0, 2.0)
    b.compute("npu", 0, 1.0, processor="npu")
    b.transfer("send", 0, 1, 100.0, num_messages=1, after=(0,))
    b.transfer("also", 0, HUB, 100.0, num_messages=1, after=(0,))
    b.compute("update", 1, 0.5, activity=Activity.UPDATE, after=(2,))
    b.compute("aggregate", HUB, 0.5, after=(3,))
    b.transfer("ping", 1, 2, 0.0, after=(2,))
    return b


def test_rows_of_a_run(tmp_path: Path) -> None:
    trace = Trace()
    clock = EventClock(toy_cluster(message_s=0.25), trace=trace)
    clock.run(busy_graph().build((0, 1)), label="round 1")
    clock.run(busy_graph().build((0, 1)), label="round 2")
    rows, document = written(trace, tmp_path)
    assert list(rows) == [
        "runs",
        "SoC 0 cpu",
        "SoC 0 npu",
        "SoC 0 network",
        "SoC 1 cpu",
        "SoC 1 network",
        "SoC 2 network",
        "hub/rx",
        "board0/up",
        "soc0/tx",
        "soc1/rx",
        "hub cpu",
    ]
    assert [(span["name"], span["ts"], span["dur"]) for span in rows["runs"]] == [
        ("round 1", 0.0, 5.0e6),
        ("round 2", 5.0e6, 5.0e6),
    ]
    assert [(span["name"], span["ts"]) for span in rows["SoC 0 cpu"]] == [
        ("compute", 0.0),
        ("compute", 5.0e6),
    ]
    # Both handle for 0.5 s (they share the sender), then both share its link for 2 s.
    first = rows["SoC 0 network"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("2 transfers", 2.0e6, 2.5e6)
    assert first["args"] == {"bytes": 200.0, "transfers": 2}
    assert (rows["soc1/rx"][0]["ts"], rows["soc1/rx"][0]["dur"]) == (2.5e6, 2.0e6)
    assert document["otherData"]["num_spans_dropped"] == 0


def test_repetitions_that_are_not_simulated_are_one_span(tmp_path: Path) -> None:
    trace = Trace()
    b = TaskGraphBuilder()
    b.compute("compute", 0, 1.0)
    b.transfer("send", 0, 1, 50.0, num_messages=0, after=(0,))
    clock = EventClock(toy_cluster(), trace=trace)
    clock.run(b.build((0, 1)), repeat=100)
    rows, _ = written(trace, tmp_path)
    assert clock.now_s == 100.5
    for row in ("SoC 0 cpu", "SoC 0 network", "SoC 1 network", "soc0/tx"):
        skipped = [
            span for span in rows[row] if "more repetitions (not re-simulated)" in span["name"]
        ]
        assert len(skipped) == 1
        assert skipped[0]["dur"] == pytest.approx(1e6 * int(skipped[0]["name"].split()[0]))
    assert max(
        span["ts"] + span["dur"] for spans in rows.values() for span in spans
    ) == pytest.approx(100.5e6)
    assert sum(span["dur"] for span in rows["SoC 0 cpu"]) == pytest.approx(100e6)


def test_a_span_that_is_under_way_at_the_cut_goes_on_after_it(tmp_path: Path) -> None:
    trace = Trace()
    b = TaskGraphBuilder()
    b.compute("compute", 0, 3.0)
    b.compute("more", 1, 1.0, after=(0,))
    b.transfer("send", 0, 2, 250.0, num_messages=0, after=(0,))
    EventClock(toy_cluster(), trace=trace).run(b.build((0, 1, 2)), repeat=50)
    rows, _ = written(trace, tmp_path)
    sent = sum(span["args"]["bytes"] for span in rows["soc0/tx"] if span["args"])
    assert sent % 250.0 == pytest.approx(0.0, abs=1e-6)
    assert sum(span["dur"] for span in rows["SoC 0 cpu"]) == pytest.approx(150e6)
    assert any(span["dur"] not in (3e6, 1e6) for span in rows["SoC 0 cpu"])


def test_spans_beyond_the_bound_are_counted(tmp_path: Path) -> None:
    trace = Trace(max_spans=4)
    clock = EventClock(toy_cluster(message_s=0.25), trace=trace)
    clock.run(busy_graph().build((0, 1)), label="round 1")
    assert (trace.num_spans, trace.room) == (5, 0)
    assert trace.num_dropped > 0
    rows, document = written(trace, tmp_path)
    assert [span["name"] for span in rows["runs"]] == ["round 1"], "the names of runs stay"
    assert document["otherData"]["num_spans_dropped"] == trace.num_dropped
    assert any(event["name"] == "process_labels" for event in document["traceEvents"])


def test_a_trace_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    refused(lambda: Trace(max_spans=0), "max_spans = 0")
    refused(lambda: Trace().write(tmp_path / "missing" / "trace.json"), "trace.json")


# ------------------------------------------------------------------------------------- leaving off and going on
def test_a_trace_handed_over_in_parts_is_the_same_trace(tmp_path: Path) -> None:
    cluster, graph = toy_cluster(), busy_graph().build(range(2))
    whole, parts = Trace(max_spans=40), []
    clock = EventClock(cluster, trace=whole)
    restored = Trace(max_spans=40)
    num_told = 0
    for repeat in (1, 3, 50, 2):
        clock.run(graph, repeat=repeat, label=f"{repeat} times")
        parts.append(json.loads(json.dumps(whole.state(num_told))))
        num_told = whole.num_spans
    assert whole.num_dropped and [span[1] for span in parts[-1]["spans"]] == ["2 times"]
    for part in parts:
        restored.restore(part)
    assert (restored.num_spans, restored.num_dropped, restored.room) == (
        num_told,
        whole.num_dropped,
        0,
    )
    for name, trace in (("whole", whole), ("restored", restored)):
        trace.write(tmp_path / name)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "restored").read_bytes()
    refused(lambda: restored.restore(parts[0]), "span 0", num_told)
