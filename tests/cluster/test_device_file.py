"""Device profiles: what is written reads back as the same device, and what cannot be is one line."""

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.cluster import LayerTimings, StepTimings, device, device_names
from socflower.cluster.device import Device
from socflower.cluster.device_catalog import (
    DeviceFile,
    LinkTable,
    catalog,
    device_table,
    figure,
    read_device_file,
    toml_text,
)
from socflower.errors import ConfigError
from socflower.toml_file import read_table


def parse_device(name: str, table: Any, where: str) -> Device:
    return read_table(DeviceFile, {"device": {name: table}}, where).device[name].device(name)


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(
    lambda text: bool(text.strip())
)
positive = st.floats(1e-12, 1e15) | st.integers(1, 10**15)
figures = st.builds(figure, positive, texts)
bare = st.text("abcdefgXYZ0189-_", min_size=1, max_size=8)


@st.composite
def timed(draw: st.DrawFn, seconds: str) -> dict[str, Any]:
    batches = sorted(draw(st.sets(st.integers(1, 999), min_size=1, max_size=4)))
    values = draw(st.lists(positive, min_size=len(batches), max_size=len(batches)))
    return {"batch": batches, seconds: values}


layers = st.builds(
    lambda name, kind, times: {"name": name, "kind": kind, **times}, texts, texts, timed("seconds")
)
models = st.builds(
    lambda rate, times, entries: {**rate, **times, **entries},
    figures,
    st.just({}) | timed("step_s"),
    st.just({}) | st.lists(layers, max_size=3).map(lambda tables: {"layer": tables}),
)
processors = st.fixed_dictionaries(
    {
        "flops_per_s": figures,
        "active_w": figures,
        "number_format": st.sampled_from(("fp32", "int8")),
    },
    optional={"model": st.dictionaries(texts, models, max_size=3)},
)
devices = st.fixed_dictionaries(
    {
        **{
            key: figures
            for key in (
                "idle_w",
                "network_w",
                "memory_bytes",
                "memory_bytes_per_s",
                "layer_overhead_s",
            )
        },
        "processor": st.dictionaries(bare, processors, min_size=1, max_size=3),
    }
)


@given(bare, devices, texts)
def test_a_profile_reads_back_as_the_same_tables_and_the_same_device(
    name: str,
    table: dict[str, Any],
    comment: str,
) -> None:
    document = {"schema": 1, "device": {name: table}}
    again = tomllib.loads(toml_text(document, comment="".join(filter(str.isprintable, comment))))
    assert again == document
    assert list(again["device"][name]["processor"]) == list(
        table["processor"]
    )  # the first is the default
    assert parse_device(name, again["device"][name], "x") == parse_device(name, table, "x")


@pytest.mark.parametrize("name", device_names())
def test_every_published_device_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    path = tmp_path / "template.toml"
    path.write_text(
        toml_text({"schema": 1, "device": {name: device_table(name)}}, comment="two\nlines"),
        "utf-8",
    )
    assert parse_device(name, read_device_file(path)["device"][name], "x") == device(name)


def test_the_whole_catalogue_reads_back() -> None:
    assert tomllib.loads(toml_text(catalog())) == catalog()


TABLE: dict[str, Any] = {
    "idle_w": figure(1, "here"),
    "network_w": figure(0, "here"),
    "memory_bytes": figure(4e9, "here"),
    "memory_bytes_per_s": figure(1e9, "here"),
    "layer_overhead_s": figure(0.0, "here"),
    "processor": {
        "cpu": {"flops_per_s": figure(1e9, "here"), "active_w": figure(2, "here")},
        "cpu-int8": {
            "flops_per_s": figure(2e9, "here"),
            "active_w": figure(2, "here"),
            "number_format": "int8",
            "shares": "cpu",
            "model": {
                "vgg11": {
                    **figure(3e9, "here"),
                    "batch": [1, 8],
                    "step_s": [1, 2.5],
                    "layer": [
                        {"name": "0", "kind": "convolution", "batch": [1, 8], "seconds": [0.5, 1]}
                    ],
                }
            },
        },
    },
}


def test_timings_and_layers_of_a_model_are_read() -> None:
    processor = parse_device("mine", TABLE, "f").processor("cpu-int8")
    assert processor.shares == "cpu"
    assert processor.rate("vgg11") == 3e9
    assert processor.timings == {"vgg11": StepTimings(batches=(1, 8), step_s=(1.0, 2.5))}
    assert processor.layer_timings == {
        "vgg11": (
            LayerTimings(
                name="0", kind="convolution", timings=StepTimings(batches=(1, 8), step_s=(0.5, 1.0))
            ),
        )
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the table above with one value set, or taken away where it is None."""
    table = copy.deepcopy(TABLE)
    *folders, last = path.split("/")
    target: Any = table
    for folder in folders:
        target = (
            target[int(folder)] if folder.isdigit() and isinstance(target, list) else target[folder]
        )
    if value is None:
        del target[last]
    else:
        target[last] = value
    return table


MODEL = "processor/cpu-int8/model/vgg11"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "idle_w",
            None,
            r"f \[device.mine\]: idle_w is missing; write idle_w = \{ value = ..., source = ",
        ),
        (
            "idle_w",
            3,
            r"f \[device.mine\] idle_w = 3 must be written idle_w = \{ value = ..., source",
        ),
        ("idle_w/value", -1, r"f \[device.mine.idle_w\] value = -1 must be a number of 0 or more"),
        ("idle_w/value", float("nan"), r"idle_w\] value = nan must be a number"),
        (
            "idle_w/value",
            float("inf"),
            r"idle_w\] value = inf must be a number of 0 or more and finite",
        ),
        ("idle_w/value", True, r"idle_w\] value = True must be a number"),
        ("idle_w/value", "much", r"idle_w\] value = 'much' must be a number"),
        (
            "idle_w/value",
            10**400,
            r"idle_w\] value = 10{199}… must be a number of 0 or more and finite",
        ),
        ("idle_w/source", " ", r"idle_w\] source = ' ' must be a text that is not empty"),
        ("idle_w/sauce", "x", r"idle_w\]: unknown key 'sauce' .*did you mean 'source'"),
        ("memory_bytes/value", 0, r"memory_bytes\] value = 0 must be a number above 0"),
        (
            "idel_w",
            3,
            r"f \[device.mine\]: unknown key 'idel_w' \(value 3\); did you mean 'idle_w'",
        ),
        ("processor", 3, r"f \[device.mine.processor\] must be a table, got 3"),
        ("processor", {}, "f: device mine: has no processor"),
        (
            "processor/cpu/number_format",
            "fp7",
            "number_format = 'fp7' is unknown; use one of fp32, int8",
        ),
        ("processor/cpu/speed", 1, r"f \[device.mine.processor.cpu\]: unknown key 'speed'"),
        ("processor/cpu/active_w", None, r"f \[device.mine.processor.cpu\]: active_w is missing"),
        (
            "processor/cpu-int8/shares",
            "gpu",
            "f: device mine: processor cpu-int8 shares = 'gpu' must name another .*: cpu",
        ),
        ("processor/cpu-int8/shares", 3, "shares = 3 must be a text"),
        (
            f"{MODEL}/value",
            0,
            r"f \[device.mine.processor.cpu-int8.model.vgg11\] value = 0 must be a number above 0",
        ),
        (f"{MODEL}/source", None, "vgg11.: source is missing"),
        (f"{MODEL}/batch", [8, 1], r"vgg11\] timings: batches must rise"),
        (f"{MODEL}/batch", [1.5, 2], "batch = .* must be a list of whole numbers"),
        (f"{MODEL}/batch", None, "need as many step_s as batches and at least one, got 2 for 0"),
        (f"{MODEL}/step_s", None, "need as many step_s as batches and at least one, got 0 for 2"),
        (f"{MODEL}/step_s", [1.0], "need as many step_s as batches"),
        (f"{MODEL}/step_s", [1.0, float("nan")], "must be a list of numbers and finite"),
        (f"{MODEL}/steps", [1.0], "unknown key 'steps' .*did you mean 'step_s'"),
        (
            f"{MODEL}/layer",
            3,
            r"layer = 3 must be written \[\[device.mine.processor.cpu-int8.model.vgg11.layer\]\]",
        ),
        (f"{MODEL}/layer/0/seconds", [-1.0, 2.0], r"layer\]\] 1 timings: step_s must be above 0"),
        (f"{MODEL}/layer/0/name", None, r"layer\]\] 1: name is missing"),
        ("link", {"peer": "x"}, r"f \[device.mine.link\]: bytes_per_s is missing"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_file_and_key(
    path: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_device("mine", changed(path, value), "f")
    assert "\n" not in str(caught.value)


def test_a_link_may_be_quick_but_not_without_rate() -> None:
    link = {
        "peer": "there:1",
        "bytes_per_s": figure(1e6, "x"),
        "round_trip_s": figure(0, "x"),
        "message_s": figure(0, "x"),
    }
    assert read_table(LinkTable, link, "f").bytes_per_s.value == 1e6
    with pytest.raises(ConfigError, match=r"f \[bytes_per_s\] value = 0 must be a number above 0"):
        read_table(LinkTable, {**link, "bytes_per_s": figure(0, "x")}, "f")
    with pytest.raises(ConfigError, match=r"f: unknown key 'pear'"):
        read_table(LinkTable, {**link, "pear": 1}, "f")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[device", "not valid TOML"),
        ("", "has no .device.NAME. table"),
        ("device = 3", "device = 3 must be tables .device.NAME."),
        ("schema = 2\n[device.a]", "schema = 2 must be 1"),
        ("[devise.a]\n[device.a]", "unknown key 'devise'"),
        (
            toml_text({"device": {"a b": device_table("jetson-nano")}}),
            "device name 'a b' must be made of",
        ),
        ("[device.a]", "idle_w is missing"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_device_file(path)
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value)
