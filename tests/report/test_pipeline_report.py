"""The page of a pipeline's plan: every pass is on it, or it says how many are not."""

from pathlib import Path
from typing import Any

import pytest

from socflower.report import pipeline_report
from socflower.report.pipeline_report import DrawnPass, timeline_plot, write_pipeline_report


def passes(num_devices: int = 2, num_micro_batches: int = 3) -> list[DrawnPass]:
    return [
        DrawnPass(f"SoC {soc}, <board>", kind, batch, start_s, start_s + 0.9)
        for soc in range(num_devices)
        for batch in range(num_micro_batches)
        for kind, start_s in (("forward", 2.0 * batch + soc), ("backward", 2.0 * batch + soc + 1.0))
    ]


def document() -> dict[str, Any]:
    stage = {
        "first_layer": "0",
        "last_layer": "<4>",
        "in_flight": 3,
        "devices": [
            {"device": "nano", "soc": 0, "share": 8, "memory_bytes": 1e6, "budget_bytes": 2e6}
        ],
    }
    return {
        "verdict": "pipeline pays here",
        "work": "a model",
        "notes": ["estimated"],
        "predicted": {"step_s": 12.5, "energy_j": 20.0, "samples_per_s": 4.0},
        "pipelines": [{"num_micro_batches": 3, "micro_batch_size": 8, "stages": [stage]}],
        "peers": [
            {"name": "single", "step_s": 25.0, "over_ours": 2.0, "interval": 1},
            {"name": "fedavg", "step_s": None, "over_ours": None, "interval": 8},
        ],
    }


@pytest.mark.usefixtures("with_pictures")
def test_every_pass_is_drawn_and_the_axis_ends_with_the_update() -> None:
    plot = timeline_plot(passes(), 12.5)
    assert {entry.name for entry in plot.legend} == {"forward pass", "backward pass"}
    assert plot.svg.count("fill: #0072b2") == plot.svg.count("fill: #e69f00") == 6
    assert "12.5 s of virtual time" in plot.svg
    assert plot.svg == timeline_plot(passes(), 12.5).svg


def test_the_page_has_stages_and_peers_and_says_what_it_leaves_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_report, "_MOST_PASSES", 5)
    path = tmp_path / "out" / "report.html"
    write_pipeline_report(path, document(), passes(), title="a <plan>", question="Why?")
    page = path.read_text()
    for expected in (
        "7 passes that begin later are not drawn",
        "does not fit",
        "2.00×",
        "a &lt;plan&gt;",
        "&lt;4&gt;",
    ):
        assert expected in page
    assert "<board>" not in page
