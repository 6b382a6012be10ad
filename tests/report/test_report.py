"""The report: complete, escaped, self-contained, repeatable, and sane where results are odd."""

import copy
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from jinja2 import UndefinedError

from socflower.report.board_picture import letter
from socflower.report.report import _ENVIRONMENT, ranges, render_report, write_report
from socflower.report.summary import comparison_of, headline_of, name_runs
from tests.one_line import refused

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class _Page(HTMLParser):
    """Checks that tags nest and keeps what the tests ask for: ids, addresses, text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.alternatives: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        self._keep(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._keep(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def _keep(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert not name.startswith("on"), f"a script: {name}={value}"
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.addresses.append(value or "")
            elif name == "aria-label":
                self.alternatives.append(value or "")

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def _plan(
    num_boards: int = 12, slots: int = 5, size: int = 4, used: int | None = None
) -> dict[str, Any]:
    groups = []
    for index in range((used or num_boards * slots) // size):
        members = list(range(index * size, (index + 1) * size))
        boards = sorted({soc // slots for soc in members})
        groups.append(
            {
                "id": index,
                "members": members,
                "leader": members[0],
                "boards": boards,
                "split": len(boards) > 1,
            }
        )
    ids = [group["id"] for group in groups]
    return {
        "groups": groups,
        "contention": 2,
        "communication_groups": [ids[::2], ids[1::2]],
        "slots_per_board": [slots] * num_boards,
    }


def _result(
    strategy: str = "socflow", *, speed: float = 1.0, plan: dict[str, Any] | None = None
) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = [
        {
            "round": index,
            "epoch": index / 4,
            "accuracy": None if index == 2 else 0.5 + index / 25,
            "loss": 2.0 / index,
            "virtual_s": 620.0 * index / speed,
            "energy_j": 5e4 * index / speed,
            "bytes": {"intra_board": 1, "inter_board": 2, "hub": 3, "wan": 4},
            "events": [],
        }
        for index in range(1, 10)
    ]
    rounds[4]["events"] = [
        {"kind": "reply-dropped", "text": "group 3: NaN in conv1.weight, dropped"}
    ]
    parts = {"compute": 700.0, "synchronisation": 200.0, "update": 60.0, "idle": 40.0}
    return {
        "schema": 1,
        "scenario": {"seed": 7, "cluster": {"boards": 12, "device": "snapdragon-865"}},
        "engine": "local",
        "strategy": strategy,
        "kernels": {"int8": "avx512-vnni"},
        "transports": {"group": "in process"},
        "seed": 7,
        "rounds": rounds,
        "final_accuracy": 0.8612,
        "energy_to_accuracy_j": 4e5 / speed,
        "virtual_s": 5580.0 / speed,
        "wall_s": 512.0,
        "energy_j": 4.5e5 / speed,
        "bytes": {"intra_board": 3.21e9, "inter_board": 4.56e8, "hub": 7.89e6, "wan": 1234},
        "weights_sha256": "ab" * 32,
        "time_to_accuracy_s": 4960.0 / speed,
        "target_accuracy": 0.8,
        "expectations": [
            {"name": "min_accuracy", "expected": 0.8, "observed": 0.8612, "holds": True},
            {"name": "max_virtual_s", "expected": 3600, "observed": 5580.0, "holds": False},
        ],
        "breakdown": {
            "soc_seconds": parts,
            "energy_j": {key: 2 * value for key, value in parts.items()},
        },
        "plan": plan,
        "notes": ["NPU: CPU int8"],
    }


def _three() -> list[dict[str, Any]]:
    return [_result(plan=_plan()), _result("ring", speed=0.02), _result("fedavg", speed=0.1)]


def _render(results: list[dict[str, Any]], **options: Any) -> _Page:
    return _Page(render_report(results, **{"title": "A title", "question": "What?", **options}))


def _text(*results: dict[str, Any], **options: Any) -> str:
    return _render(list(results), **options).text


def _has(text: str, *expected: str) -> None:
    for each in expected:
        assert each in text, each


def test_sections_come_in_order_and_hold_every_number() -> None:
    page = _render(_three())
    headings = (
        "A title",
        "What?",
        "Result",
        "Totals",
        "Expectations",
        "Rounds",
        "Accuracy over energy",
        "Where time and energy go",
        "Groups on boards",
        "Events",
        "Resolved scenario",
        "How it ran",
    )
    place = 0
    for heading in headings:
        place = page.text.index(heading, place) + len(heading)
    _has(
        page.text,
        "86.1%",
        "1 h 33 min",
        "1 h 23 min",
        "Time to 80.0%",
        "450 kJ",
        "125 Wh",
        "3.21 GB",
        "456 MB",
        "7.89 MB",
        "1.23 kB",
        "8 min 32 s",
        "50.0×",
        "10.0×",
        "0.8612",
        "3600",
        "✓ holds",
        "✗ fails",
        "3 of 6 expectations fail.",
        "11 min 40 s",
        "3 min 20 s",
        "1 min 00 s",
        "40.0 s",
        "1.40 kJ",
        "400 J",
        "reply-dropped",
        "group 3: NaN in conv1.weight, dropped",
        "snapdragon-865",
        "ab" * 32,
        "avx512-vnni",
        "in process",
        "NPU: CPU int8",
        "ui.perfetto.dev",
        "trace.json",
        "15 groups",
        "B = groups 1, 3, 5",
    )


@pytest.mark.usefixtures("with_pictures")
def test_needs_no_network_and_no_script() -> None:
    html = render_report(_three(), title="A title")
    page = _Page(html)
    outside = [address for address in page.addresses if not address.startswith("#")]
    assert outside == ["https://ui.perfetto.dev"]
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", html)
    others = set(re.findall(r"https?://[^\"'\s<)]+", html)) - {"https://ui.perfetto.dev"}
    assert others <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.parametrize(
    ("uplink_turns", "says"),
    [(True, "take turns: A"), (False, "run freely, without turns: A")],
)
def test_the_note_on_groups_says_whether_they_take_turns(uplink_turns: bool, says: str) -> None:
    plan = {**_plan(), "uplink_turns": uplink_turns}
    assert f"Communication groups {says}" in _text(_result(plan=plan))


@pytest.mark.usefixtures("with_pictures")
def test_ids_are_unique_and_every_reference_has_its_target() -> None:
    html = render_report(
        [_result(plan=_plan()), _result("other", plan=_plan(size=3))], title="A title"
    )
    page = _Page(html)
    assert len(page.ids) == len(set(page.ids))
    references = {address[1:] for address in page.addresses if address.startswith("#")}
    references |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert references and references <= set(page.ids)


@pytest.mark.usefixtures("with_pictures")
def test_whatever_the_user_provides_is_escaped() -> None:
    evil = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&lt;"
    result = _result(evil, plan=_plan())
    for key in ("engine", "seed", "weights_sha256", "schema"):
        result[key] = evil
    result |= {"kernels": {evil: evil}, "transports": [evil], "notes": [evil]}
    result["scenario"] = {evil: [evil]}
    result["expectations"][0].update(name=evil, expected=evil, observed=evil)
    result["rounds"][0].update(
        round=evil, epoch=evil, loss=evil, accuracy=evil, events=[{"kind": evil, "text": evil}]
    )
    result["plan"]["groups"][0].update(id=evil, leader=evil, boards=[evil])
    result["plan"].update(contention=evil, communication_groups=[[evil], [1]])
    page = _render([result, _result()], title=evil, question=evil)
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count("<script>alert('x')</script>") > 20


@pytest.mark.usefixtures("with_pictures")
def test_mathematics_and_odd_characters_in_names_are_plain_text() -> None:
    names = [
        "$x^2",
        "_hidden",
        "100% \\frac{",
        "socflow 组 😀",
        "bell\x07 \ud800 \x00",
        "a" * 200,
        "",
    ]
    page = _render([_result(name) for name in names])
    assert "$x^2" in page.text and "socflow 组" in page.text and "unnamed" in page.text
    assert "\x07" not in page.text and "\x00" not in page.text


def test_equal_input_gives_equal_bytes_whatever_matplotlib_is_set_to(tmp_path: Path) -> None:
    write_report(tmp_path / "a.html", _three(), title="A title")
    with matplotlib.rc_context({"lines.linewidth": 9.0, "svg.fonttype": "path", "font.size": 30.0}):
        write_report(tmp_path / "b.html", copy.deepcopy(_three()), title="A title")
        assert matplotlib.rcParams["font.size"] == 30.0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_writing_replaces_the_old_report_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, [_result()], title="first")

    def no_space(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        write_report(path, [_result()], title="second")
    assert "<h1>first</h1>" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_one_result_is_compared_with_nothing() -> None:
    text = _text(_result())
    assert "as fast as" not in text and "speedup_over" not in text
    assert "1 of 2 expectations fails." in text


def test_the_headline_compares_the_first_with_the_best_of_the_others() -> None:
    sentence = "socflow reaches 80.0% in 1 h 23 min of virtual time, 10.0× as fast as the best alternative: fedavg"
    assert sentence in _text(*_three())
    assert headline_of(_three()) == f"{sentence} takes 13 h 47 min."
    slower = headline_of([_result("ring", speed=0.5), _result("sgd")])
    assert (
        slower
        == "ring reaches 80.0% in 2 h 45 min of virtual time; one SoC (sgd) is 2.00× as fast and "
        "takes 1 h 23 min."
    )
    refused(lambda: render_report([], title="A title"))


def test_every_alternative_has_the_ratios_of_its_time_and_energy() -> None:
    comparison = comparison_of(name_runs(_three()))
    assert comparison is not None
    ratios = {
        each.run.label: (each.time_ratio, each.energy_ratio) for each in comparison.alternatives
    }
    assert list(ratios) == ["ring", "fedavg"]
    assert [*ratios["ring"], *ratios["fedavg"]] == pytest.approx([50.0, 50.0, 10.0, 10.0])
    text = _text(*_three())
    assert "50.0× as fast as ring" in text and "10.0× as fast as fedavg" in text
    assert "1 h 23 min instead of 13 h 47 min; 400 kJ instead of 4.00 MJ" in text


def test_who_misses_the_target_is_never_praised() -> None:
    results = _three()
    results[0].update(time_to_accuracy_s=None, energy_to_accuracy_j=None)
    text = _text(*results)
    assert "socflow never reached 80.0%; fedavg did, in 13 h 47 min of virtual time." in text
    assert "not reached" in text and "as fast as" not in text
    alone = _three()
    for result in alone[1:]:
        result.update(time_to_accuracy_s=None, energy_to_accuracy_j=None)
    text = _text(*alone)
    assert "no other strategy reached it" in text and "ring did not reach it" in text


def test_without_a_target_whole_trainings_are_compared() -> None:
    results = [
        {**result, "target_accuracy": None, "time_to_accuracy_s": None} for result in _three()
    ]
    assert (
        headline_of(results)
        == "socflow takes 1 h 33 min of virtual time, 10.0× as fast as the best alternative: "
        "fedavg takes 15 h 30 min."
    )


def test_the_result_says_what_is_real_and_what_is_modelled() -> None:
    assert "Accuracy: real training, on this machine. Time, energy and bytes: modelled" in _text(
        *_three()
    )
    deployed = [
        {**result, "virtual_s": None, "predicted_s": 1.0, "wall_s": 20.0} for result in _three()
    ]
    assert "Time: as measured. Energy and bytes: modelled." in _text(*deployed)


def test_predictions_stand_apart_and_say_that_nothing_was_trained() -> None:
    rows = [
        {
            "model": "<vgg11>",
            "data": "cifar10",
            "batch_size": 64,
            "arithmetic": arithmetic,
            "strategy": name,
            "epoch_s": seconds,
            "epoch_energy_j": 7000.0,
            "step_samples": 512 if name == "socflow" else 64,
            "equal_epoch_s": None if name == "sgd" else min(seconds, 100.0),
            "best_epoch_s": seconds / 2,
            "best_epoch_energy_j": 4000.0,
            "best": {} if name == "sgd" else {"socs": 8},
        }
        for arithmetic, times in (("fp32", (80.0, 400.0, 160.0)), ("mixed", (60.0, 400.0, 90.0)))
        for name, seconds in zip(("socflow", "ring", "sgd"), times, strict=True)
    ]
    text = _text(*_three(), predictions=rows)
    assert "Predicted, not trained" in text and "Predicted, not trained" not in _text(*_three())
    assert (
        "<vgg11>, fp32 cifar10, 512 samples a step 1.25× 2.00× 1 min 20 s 40.0 s, 4.00 kJ with socs = 8 "
        "1 min 40 s 3 min 20 s, 4.00 kJ with socs = 8" in text
    )
    assert "1.67×" in text and "1.50×" in text


def test_caveats_stand_right_below_the_headline() -> None:
    page = _render(_three(), caveats=["<ring> ran on 32 SoCs"])
    assert (
        f"{comparison_of(name_runs(_three())).headline()} But <ring> ran on 32 SoCs." in page.text
    )
    assert "But" not in _text(*_three())


@pytest.mark.slow
@pytest.mark.usefixtures("with_pictures")
def test_totals_that_differ_much_are_drawn_on_a_logarithmic_axis() -> None:
    assert "energy, logarithmic" in _text(_result(), _result("ring", speed=0.01))
    assert "energy, logarithmic" not in _text(_result(), _result("ring", speed=0.5))


def test_same_strategy_twice_is_told_apart() -> None:
    results = [_result(), {**_result(), "seed": 8}, {**_result(), "seed": 8}, _result("ring")]
    assert [run.label for run in name_runs(results)] == [
        "socflow (seed 7)",
        "socflow (seed 8) #1",
        "socflow (seed 8) #2",
        "ring",
    ]


def test_expectations_that_could_not_be_checked_are_no_success_and_values_are_not_rounded() -> None:
    unchecked = {"name": "min_speedup_over_ring", "expected": 5, "observed": None, "holds": None}
    checked = {"name": "min_accuracy", "expected": 0.8, "observed": 0.79999999, "holds": True}
    _has(
        _text({**_result(), "expectations": [unchecked, checked]}),
        "1 of 2 expectations hold, 1 could not be checked",
        "? not checked",
        "0.79999999",
    )


@pytest.mark.usefixtures("with_pictures")
def test_logarithmic_time_only_where_spans_differ_more_than_eightfold() -> None:
    assert "virtual time, logarithmic" in _text(*_three())
    assert "logarithmic" not in _text(_result(), _result("ring", speed=0.2))


def test_pictures_say_in_words_what_they_show() -> None:
    alternatives = " ".join(_render(_three()).alternatives)
    _has(
        alternatives,
        "socflow: 86.0% after 1 h 33 min",
        "compute 11 min 40 s",
        "15 groups on 12 boards with 60 slots; 9 groups split over boards; 0 slots idle",
    )


@pytest.mark.few_cells(4)
@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": []},
        {"rounds": None},
        {"plan": None},
        {"expectations": []},
        {"breakdown": None},
        {"bytes": {}},
        {"virtual_s": None, "predicted_s": 7200.0, "time_to_accuracy_s": None},
        {"energy_j": 0.0},
        {"notes": None},
        {
            "final_accuracy": math.nan,
            "virtual_s": math.nan,
            "energy_j": math.inf,
            "wall_s": math.nan,
        },
        {
            "breakdown": {
                "soc_seconds": {"compute": math.nan, "idle": -1.0},
                "energy_j": {"compute": 0, "idle": 0},
            }
        },
        {"target_accuracy": None, "time_to_accuracy_s": None},
        {"scenario": None},
        {"kernels": None},
        {"plan": {"groups": [], "slots_per_board": []}},
        {"plan": {**_plan(), "slots_per_board": [0, 3]}},
        {"plan": {**_plan(), "communication_groups": [], "slots_per_board": [16, 1, 40, 3]}},
    ],
)
def test_odd_results(changes: dict[str, Any]) -> None:
    odd = {**_result(plan=_plan()), **changes}
    _render([odd, _result("ring", speed=0.5), odd])


def test_only_a_strategy_name_is_enough() -> None:
    page = _render([{"strategy": "socflow"}])
    _has(
        page.text,
        "No accuracy was measured",
        "No breakdown was recorded",
        "No strategy of this report forms groups",
        "expects nothing",
        "No event was recorded",
    )


@pytest.mark.few_cells(2)
@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accuracy", None),
        ("accuracy", math.nan),
        ("virtual_s", None),
        ("virtual_s", 0.0),
        ("energy_j", math.nan),
        ("energy_j", 0.0),
        ("loss", math.inf),
        ("events", None),
    ],
)
def test_odd_rounds(key: str, value: Any) -> None:
    result = _result()
    for row in result["rounds"]:
        row[key] = value
    page = _render([result, _result("ring", speed=0.01)])
    assert "nan" not in " ".join(page.words).lower().replace("nan in conv1", "")


@pytest.mark.usefixtures("with_pictures")
def test_without_virtual_time_accuracy_is_shown_over_epochs() -> None:
    result = _result()
    result.update(virtual_s=None, time_to_accuracy_s=None, predicted_s=7200.0)
    for row in result["rounds"]:
        row["virtual_s"] = None
    page = _render([result])
    assert "Accuracy over epochs" in page.text and "predicted 2 h 00 min" in page.text


def _picture(plan: dict[str, Any]) -> str:
    """The picture of the groups, with what is below it."""
    html = render_report([_result(plan=plan)], title="A title")
    section = html[html.index("Groups on boards") :]
    return section[section.index('<svg viewBox="0 0') : section.index("<details")]


def test_a_thousand_socs_stay_a_picture_and_more_are_cut() -> None:
    svg = _picture(_plan(200, 5, 8, 990))
    ((width, height),) = re.findall(r'<svg viewBox="0 0 (\S+) (\S+)"', svg)
    assert float(width) <= 1090 and float(height) <= 900
    assert svg.count("<title>SoC ") == 1000 and svg.count(": idle</title>") == 1000 - 984
    many = _picture(_plan(2000, 5, 5))
    assert "The first 400 of 2000 boards are drawn." in many and many.count("<title>SoC ") == 2000


def test_picture_marks_leaders_split_groups_and_communication_groups() -> None:
    svg = _picture(_plan())
    assert svg.count("★") == 15 and svg.count("spans these boards") == 9
    assert "<title>SoC 4: group 1, leader, split over boards, communication group B</title>" in svg


def test_strategies_that_share_a_plan_share_its_picture() -> None:
    html = render_report([_result("a", plan=_plan()), _result("b", plan=_plan())], title="A title")
    assert html.count('aria-label="15 groups') == 1 and "<h3>a, b</h3>" in html


def test_long_lists_are_cut_and_say_so() -> None:
    result = _result()
    row = result["rounds"][4]
    result["rounds"] = [
        {**row, "round": index, "events": row["events"] * 2} for index in range(1, 1001)
    ]
    page = _render([result])
    assert "Every 5th of 1000 rounds." in page.text and "The first 500 of 2000 events" in page.text
    assert re.search(r"\b1000 1\.25 ", page.text), "the last round is in the table"


def test_results_survive_their_json_file() -> None:
    results = _three()
    assert render_report(json.loads(json.dumps(results)), title="A") == render_report(
        results, title="A"
    )


def test_ranges_and_letters() -> None:
    assert ranges([7, 0, 1, 2]) == "0–2, 7" and ranges(["a", 1]) == "a, 1" and ranges([]) == ""
    assert [letter(index) for index in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]


@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize("key", ["alpha", "copy_similarity"])
def test_mixed_precision_has_pictures_of_its_share_and_confidence_and_others_have_not(
    key: str,
) -> None:
    plain = _render([_result()])
    assert "mixing" not in plain.ids
    result = _result()
    for index, entry in enumerate(result["rounds"][1:]):
        entry.update({key: 0.99 - 0.01 * index, "cpu_share": 0.375})
    page = _render([result])
    # Two pictures, each for light and for dark pages.
    assert len(page.alternatives) == len(plain.alternatives) + 4
    assert "mixing" in page.ids
    assert any("gamma" in text and "37.5%" in text for text in page.alternatives)


def _hot(strategy: str = "hot") -> dict[str, Any]:
    history = {
        "at_s": [0, 10, 20, 30],
        "hottest_c": [25, 60, 70, 81.0],
        "mean_clock": [1, 1, 0.9, 0.8],
        "rpm": [0, 1000, 2000, 3000],
    }
    return {
        **_result(strategy),
        "heat": {"peak_c": 81.26, "slowdown": 0.123, "cooling_j": 999.0, "history": history},
    }


def _split(strategy: str = "split-replay") -> dict[str, Any]:
    return {
        **_result(strategy),
        "split": {
            "start": "after conv1",
            "end": "edge alone",
            "num_moves": 1,
            "mean_staleness": 1.5,
            "max_staleness": 3,
            "busy": {"edge": 0.5, "up": 0.25, "cloud": 0.1, "down": None},
            "cut_names": ["conv1", "pool1"],
            "cuts_over_time": [[0.0, 0], [30.0, 2], [60.0, 2]],
            "link_over_time": [[0.0, 1e6, 2e6], [60.0, 5e5, 1e6]],
            "moves": [
                {
                    "at_s": 30.0,
                    "edge": 0,
                    "batch": 12,
                    "from": "conv1",
                    "to": "edge alone",
                    "migration_s": 0.5,
                }
            ],
        },
    }


def test_heat_has_its_plots_and_totals_and_runs_without_a_history_a_line() -> None:
    page = _render([_hot(), {**_result("cold"), "heat": {"peak_c": None}}, _result()])
    _has(page.text, "81.3 °C", "12.3%", "999 J", "clocks fall at ", "Slower than planned")
    assert any("fans up to 3,000 rpm" in text for text in page.alternatives)
    assert "nothing could get hot" in _text({**_result(), "heat": {"peak_c": None}})
    assert "heat" not in _render([_result()]).ids


def test_edge_and_cloud_have_their_plot_totals_and_moves() -> None:
    page = _render([_split(), _result()])
    _has(
        page.text,
        "after conv1",
        "1.50",
        "25.0%",
        "Moves of the cut: split-replay",
        "Moving took",
        "500 ms",
    )
    assert any("begins with conv1, ends with edge alone" in text for text in page.alternatives)
    bare = _render([{**_result(), "split": {"start": "conv1"}}])
    assert "No link and no cut were recorded" in bare.text and "Moves of the cut" not in bare.text
    assert "edge-cloud" not in _render([_result()]).ids


def test_a_deployment_has_real_time_and_restarts() -> None:
    result = {
        **_result(),
        "virtual_s": None,
        "predicted_s": 7200.0,
        "time_to_accuracy_s": None,
        "restarts": [{"after_round": 3, "cause": "the SuperLink ended <killed>"}],
    }
    for index, row in enumerate(result["rounds"]):
        row.update(virtual_s=None, wall_s=10.0 * index)
    page = _render([result])
    _has(
        page.text,
        "Accuracy over wall time",
        "Real time since",
        "Predicted time",
        "the SuperLink ended <killed>",
    )


@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize("make", [_hot, _split])
def test_names_of_strategies_are_escaped_in_every_section(make: Any) -> None:
    evil = "<script>alert(1)</script>"
    result = {**make(evil), "plan": _plan()}
    if "split" in result:
        result["split"].update(start=evil, end=evil, cut_names=[evil, evil])
        result["split"]["moves"][0].update({"from": evil, "to": evil, "batch": evil, "edge": evil})
    page = _render([result])
    assert "script" not in page.tags and page.text.count(evil) >= 4


def test_a_template_that_prints_an_unknown_name_fails() -> None:
    with pytest.raises(UndefinedError, match="unheard_of"):
        _ENVIRONMENT.from_string("{{ unheard_of }}").render()
    assert _ENVIRONMENT.from_string("{{ name }}").render(name="<b>\x00") == "&lt;b&gt;\ufffd"


def _app(label: str = "app", **changes: Any) -> dict[str, Any]:
    """Return the result of an app, as `run_app_folder` has it."""
    result = {
        **_result(label),
        "app": f"apps/{label}",
        "unknown": {},
        "expectations": [],
        "events": [],
        **changes,
    }
    for row in result["rounds"]:
        del row["epoch"]
        row["server"] = {"rmse": 2.5}
        row["events"] = []
    return result


def _without(result: dict[str, Any], *keys: str) -> dict[str, Any]:
    for row in result["rounds"]:
        row.update(dict.fromkeys(keys))
    return {**result, **dict.fromkeys(keys), "final_accuracy": None if "accuracy" in keys else 0.5}


def test_of_apps_no_sentence_is_about_a_scenario() -> None:
    text = _text(_app())
    for wrong in ("scenario", "[expect]", "defaults included", "Epoch"):
        assert wrong not in text, wrong
    assert "No claim was given; --expect 'accuracy>=0.9' checks one." in text
    assert "App and run config" in text and "server/rmse" in text and "2.5" in text


def test_of_apps_with_other_metrics_the_report_says_which_are_there() -> None:
    reason = "no metric that the app evaluates is called acc or accuracy: it has rmse"
    text = _text(_without(_app(unknown={"final_accuracy": reason}), "accuracy"))
    assert "was measured" not in text and "accounted for" not in text
    assert text.count(f"app: {reason}.") == 2 and f"final_accuracy is not known: {reason}" in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plan": _plan()}, "15 groups"),
        ({"plan": None}, "No strategy of this report forms groups."),
        (
            {"plan": None, "unknown": {"strategy": "none is started"}},
            "The strategy of app is not known, nor whether it forms groups.",
        ),
    ],
)
def test_whether_the_strategy_of_an_app_forms_groups(
    changes: dict[str, Any], sentence: str
) -> None:
    text = _text(_app(**changes))
    assert sentence in text
    assert ("forms groups" in text) == (sentence != "15 groups")


def test_an_app_of_which_nothing_has_a_price_is_compared_in_wall_time() -> None:
    unpriced = _without(_app("unpriced"), "virtual_s", "energy_j", "bytes")
    for row in unpriced["rounds"]:
        row["wall_s"] = 3.0 * row["round"]
    unpriced |= {"time_to_accuracy_s": 6.0, "wall_s": 27.0}
    page = _render([_app("priced", time_to_accuracy_s=9.0, wall_s=30.0), unpriced])
    assert "priced reaches 80.0% in 9.00 s of wall time; unpriced is 1.50× as fast" in page.text
    assert "Time: as measured. Energy and bytes: modelled." in page.text
    alone = _text(unpriced)
    assert "Accuracy over wall time Real time since the app began." in alone
    assert "No energy was accounted for in the rounds that have an accuracy." in alone
    whole = headline_of(
        [
            _app("priced", target_accuracy=None, time_to_accuracy_s=None, wall_s=30.0),
            {**unpriced, "target_accuracy": None, "time_to_accuracy_s": None},
        ]
    )
    assert whole == "priced takes 30.0 s of wall time; unpriced is 1.11× as fast and takes 27.0 s."


def test_events_of_an_app_without_rounds_are_shown() -> None:
    event = {
        "kind": "no-message",
        "text": "the ServerApp sent no message to any client",
        "round": None,
    }
    text = _text(_app(events=[event]) | {"rounds": []})
    assert event["text"] in text and "No event was recorded" not in text
