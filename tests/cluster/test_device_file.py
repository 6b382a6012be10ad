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
from socflower.toml_file import read_table
from tests.one_line import refused


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
        **dict.fromkeys(
            ("idle_w", "network_w", "memory_bytes", "memory_bytes_per_s", "layer_overhead_s"),
            figures,
        ),
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
        target = target[int(folder) if isinstance(target, list) else folder]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return table


MODEL = "processor/cpu-int8/model/vgg11"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("idle_w", None, "[device.mine]: idle_w"),
        ("idle_w", 3, "[device.mine] idle_w = 3"),
        ("idle_w/value", -1, "[device.mine.idle_w] value = -1"),
        ("idle_w/value", float("nan"), "idle_w] value = nan"),
        ("idle_w/value", float("inf"), "idle_w] value = inf"),
        ("idle_w/value", True, "idle_w] value = True"),
        ("idle_w/value", "much", "idle_w] value = 'much'"),
        ("idle_w/value", 10**400, "idle_w] value = 1000"),
        ("idle_w/source", " ", "idle_w] source = ' '"),
        ("idle_w/sauce", "x", "idle_w]: unknown key 'sauce'"),
        ("memory_bytes/value", 0, "memory_bytes] value = 0"),
        ("idel_w", 3, "[device.mine]: unknown key 'idel_w'"),
        ("processor", 3, "[device.mine.processor]"),
        ("processor", {}, "device mine"),
        ("processor/cpu/number_format", "fp7", "number_format = 'fp7'"),
        ("processor/cpu/speed", 1, "[device.mine.processor.cpu]: unknown key 'speed'"),
        ("processor/cpu/active_w", None, "[device.mine.processor.cpu]: active_w"),
        ("processor/cpu-int8/shares", "gpu", "shares = 'gpu'"),
        ("processor/cpu-int8/shares", 3, "shares = 3"),
        (f"{MODEL}/value", 0, "[device.mine.processor.cpu-int8.model.vgg11] value = 0"),
        (f"{MODEL}/source", None, "source"),
        (f"{MODEL}/batch", [8, 1], "batches"),
        (f"{MODEL}/batch", [1.5, 2], "batch = [1.5, 2]"),
        (f"{MODEL}/batch", None, "batches"),
        (f"{MODEL}/step_s", None, "step_s"),
        (f"{MODEL}/step_s", [1.0], "step_s"),
        (f"{MODEL}/step_s", [1.0, float("nan")], "step_s = [1.0, nan]"),
        (f"{MODEL}/steps", [1.0], "unknown key 'steps'"),
        (f"{MODEL}/layer", 3, "[[device.mine.processor.cpu-int8.model.vgg11.layer]]"),
        (f"{MODEL}/layer/0/seconds", [-1.0, 2.0], "layer]] 1"),
        (f"{MODEL}/layer/0/name", None, "layer]] 1: name"),
        ("link", {"peer": "x"}, "[device.mine.link]: bytes_per_s"),
    ],
)
def test_what_cannot_be_names_file_and_key(path: str, value: Any, named: str) -> None:
    refused(lambda: parse_device("mine", changed(path, value), "f"), "f", named)


def test_a_link_may_be_quick_but_not_without_rate() -> None:
    link = {
        "peer": "there:1",
        "bytes_per_s": figure(1e6, "x"),
        "round_trip_s": figure(0, "x"),
        "message_s": figure(0, "x"),
    }
    assert read_table(LinkTable, link, "f").bytes_per_s.value == 1e6
    for changes, named in (
        ({"bytes_per_s": figure(0, "x")}, "[bytes_per_s] value = 0"),
        ({"pear": 1}, "'pear'"),
    ):
        refused(lambda table=link | changes: read_table(LinkTable, table, "f"), "f", named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[device", "TOML"),
        ("", "[device.NAME]"),
        ("device = 3", "device = 3"),
        ("schema = 2\n[device.a]", "schema = 2"),
        ("[devise.a]\n[device.a]", "'devise'"),
        (toml_text({"device": {"a b": device_table("jetson-nano")}}), "'a b'"),
        ("[device.a]", "idle_w"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refused(lambda: read_device_file(path), "mine.toml", named)
