from pathlib import Path

import pytest

from socflower.scenario.schema.file import from_document, load_scenario, to_document
from tests.one_line import last_key, refused

SPLIT = """# Does it pay?
schema = 1
[cluster]
boards = 1
socs_per_board = 1
device = "raspberry-pi-4b"
[strategy]
name = "split-replay"
"""


def written(folder: Path, text: str = "", base: str = SPLIT) -> Path:
    path = folder / "split.toml"
    path.write_text(base + text)
    return path


def test_a_resolved_split_scenario_is_read_as_it_was_written(tmp_path: Path) -> None:
    links = load_scenario(written(tmp_path, '[edgecloud]\nlink = ["wifi", "5g"]\n'))
    assert links.split.link == ("wifi", "5g") and from_document(to_document(links)) == links
    scenario = load_scenario(
        written(
            tmp_path,
            """[edgecloud]
window = [[0.0, 4], [0.5, 5]]
segments = [[10, 1e6, 2e6], [5.0, 0, 0]]
bits = [2, 8]
cut = 3
""",
        )
    )
    assert scenario.split.window == ((0.0, 4.0), (0.5, 5.0))
    assert scenario.split.segments == ((10.0, 1e6, 2e6), (5.0, 0.0, 0.0))
    assert from_document(to_document(scenario)) == scenario


def test_what_is_compared_by_default_is_of_the_strategys_family(tmp_path: Path) -> None:
    assert load_scenario(written(tmp_path)).compare.strategies == (
        "split-replay",
        "pipelined",
        "joint-dnn",
        "split",
        "edge-only",
    )
    others = load_scenario(written(tmp_path), ["strategy.name=socflow"])
    assert others.compare.strategies == ("socflow", "ring", "fedavg", "sgd")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("[edgecloud]\nbits = [3]", "2, 4, 8, 16, 32"),
        ("[edgecloud]\nerror_feedback = 'both'", "none, diagonal"),
        ("[edgecloud]\nwindow = [[0.1, 4]]", "window = [[0.1, 4.0]]"),
        ("[edgecloud]\nwindow = [[0.0, 4], [0.0, 5]]", "window"),
        ("[edgecloud]\nwindow = [[0.0, 4], [1.0, 5]]", "window"),
        ("[edgecloud]\nwindow = [[0.0, 4.5]]", "whole number"),
        ("[edgecloud]\nlink = 'constant'", "bytes_per_s = None"),
        ("[edgecloud]\nlink = 'constant'\nbytes_per_s = [1e6]", "bytes_per_s = [1000000.0]"),
        ("[edgecloud]\nrepeats = true", "repeats"),
        ("[edgecloud]\nlink = ['wifi']\nsegments = [[1, 1, 1]]", "link = ['wifi'] and segments"),
        ("[edgecloud]\nlink = []", "link = []"),
        ("[edgecloud]\nshared_bytes_per_s = [1e6]", "shared_bytes_per_s = [1000000.0]"),
        ("[edgecloud]\ncloud_model = 'shared'\ncloud_processors = 2", "cloud_processors = 2"),
        ("[edgecloud]\nspeed = 1", "speed"),
        ("[precision]\narithmetic = 'int8'\n[model]\nname = 'digit-generator'", "images"),
        ("[precision]\narithmetic = 'int8'\n[edgecloud]\nfrozen = '1'", "frozen = '1'"),
        ("[precision]\narithmetic = 'int8'\n[edgecloud]\ncosts = 'costs.json'", "costs.json"),
        ("[[event]]\nkind = 'die'\nsoc = 0\nround = 1", "kind = 'die'"),
        ("[compare]\nstrategies = ['ring']", "'ring'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, table: str, named: str) -> None:
    refused(lambda: load_scenario(written(tmp_path, table)), named)


@pytest.mark.parametrize(
    "line",
    [
        "bits = []",
        "gradient_bits = 7",
        "cloud_model = 'none'",
        "window = 5",
        "window = []",
        "bytes_per_s = [1000000.0, 1000000.0]",
        "jitter = -0.1",
        "jitter = 0.1",
        "latency_s = -1",
        "latency_s = 0.1",
        "cloud_processors = 0",
        "cut = ''",
        "segments = [[1, 2]]",
    ],
)
def test_a_value_that_its_key_does_not_take_is_named_with_the_key(
    tmp_path: Path, line: str
) -> None:
    text = f"[edgecloud]\n{line}"
    refused(lambda: load_scenario(written(tmp_path, text)), "[edgecloud]", line)


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nlocal_epochs = 2",
        "[train]\nreduction = 'always'",
        "[precision]\nheld_out = 5",
        "[thermal]\nrpm = -1",
    ],
)
def test_what_a_split_training_does_not_read_is_named(tmp_path: Path, text: str) -> None:
    refused(lambda: load_scenario(written(tmp_path, text)), last_key(text))


@pytest.mark.parametrize("strategy", ["fedavg", "socflow", "ring"])
def test_a_cloud_is_for_split_strategies_only(tmp_path: Path, strategy: str) -> None:
    other = SPLIT.replace("split-replay", strategy)
    path = written(tmp_path, "[edgecloud]\nlink = 'wifi'\n", other)
    refused(lambda: load_scenario(path), "[edgecloud]", "split-replay", repr(strategy))


@pytest.mark.parametrize("key", ["edges", "edge_device"])
def test_the_edges_are_the_clusters(tmp_path: Path, key: str) -> None:
    """There is no number of edges in `[edgecloud]`, and none beside groups."""
    path = written(tmp_path, f"[edgecloud]\n{key} = 1\n")
    refused(lambda: load_scenario(path), f"unknown key '{key}'")
