from pathlib import Path

import pytest

from socflower.errors import ConfigError
from socflower.scenario.schema.file import from_document, load_scenario, to_document

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
    links = load_scenario(written(tmp_path, '[edgecloud]\nlinks = ["wifi", "5g"]\n'))
    assert links.split.links == ("wifi", "5g") and from_document(to_document(links)) == links
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
    ("table", "said"),
    [
        (
            "[edgecloud]\nbits = [3]",
            r"bits = \[3\] must be a list of whole numbers out of 2, 4, 8, 16, 32",
        ),
        ("[edgecloud]\nbits = []", "bits = "),
        ("[edgecloud]\ngradient_bits = 7", "gradient_bits"),
        (
            "[edgecloud]\nerror_feedback = 'both'",
            "error_feedback = 'both' is unknown; use one of none, diagonal",
        ),
        ("[edgecloud]\ncloud_model = 'none'", "cloud_model = 'none' is unknown"),
        ("[edgecloud]\nwindow = 5", "window = 5 must be a list"),
        ("[edgecloud]\nwindow = [[0.1, 4]]", "whose parts rise from 0.0"),
        ("[edgecloud]\nwindow = [[0.0, 4], [0.0, 5]]", "whose parts rise from 0.0"),
        ("[edgecloud]\nwindow = [[0.0, 4.5]]", "each K must be a whole number"),
        ("[edgecloud]\nlink = 'constant'", 'up_bytes_per_s = None: link = "constant" needs it'),
        ("[edgecloud]\nup_bytes_per_s = 1e6", "up_bytes_per_s = 1000000.0"),
        (
            "[edgecloud]\njitter = -0.1\nsegments = [[1, 1, 1]]",
            "jitter = -0.1 must be a number of 0 or more",
        ),
        ("[edgecloud]\njitter = 0.1", "generated links scatter by themselves"),
        (
            "[edgecloud]\ntrace_seed = -1",
            "trace_seed = -1 must be a whole number from 0 to 4294967295",
        ),
        ("[edgecloud]\nlatency_s = -1", "latency_s"),
        ("[edgecloud]\nlatency_s = 0.1", 'latency_s = 0.1 is of segments and of link = "constant"'),
        ("[edgecloud]\nrepeats = true", "repeats is of segments, and there are none"),
        (
            "[edgecloud]\nlinks = ['wifi']\nsegments = [[1, 1, 1]]",
            "links and segments: .* leave one of the two out",
        ),
        (
            "[edgecloud]\nlink = '5g'\nlinks = ['wifi']",
            "link = '5g': links names one for each edge",
        ),
        ("[train]\nlocal_epochs = 2", "local_epochs = 2: .*'split-replay' does not read it"),
        (
            "[train]\nreduction = 'always'",
            "reduction = 'always': .*'split-replay' does not read it",
        ),
        ("[edgecloud]\nround_epochs = 0", "round_epochs"),
        ("[edgecloud]\nshared_up_bytes_per_s = 1e6", "are one link; give both or none"),
        ("[edgecloud]\ncloud_processors = 0", "cloud_processors"),
        (
            "[edgecloud]\ncloud_processors = 2\ncloud_model = 'shared'",
            "a shared half has one processor",
        ),
        ("[edgecloud]\ncut = ''", "cut = '' must be a whole number or a text that is not empty"),
        ("[edgecloud]\nsegments = [[1, 2]]", "list of triples of numbers"),
        ("[edgecloud]\nspeed = 1", "speed"),
        (
            "[precision]\narithmetic = 'int8'\n[model]\nname = 'digit-generator'",
            "train classifiers of images",
        ),
        ("[precision]\nheld_out = 5", "trains on all samples"),
        (
            "[precision]\narithmetic = 'int8'\n[edgecloud]\nfrozen = '1'",
            "frozen layers stay in evaluation mode",
        ),
        (
            "[precision]\narithmetic = 'int8'\n[edgecloud]\ncosts = 'costs.json'",
            "were measured in FP32",
        ),
        ("[thermal]\nrpm = -1", "rpm = -1"),
        ("[[event]]\nkind = 'die'\nsoc = 0\nround = 1", "kind = 'die': .* knows 'preempt' only"),
        ("[compare]\nstrategies = ['ring']", "'ring' cannot run the workload of 'split-replay'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load_scenario(written(tmp_path, table))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", ["fedavg", "socflow", "ring"])
def test_a_cloud_is_for_split_strategies_only(tmp_path: Path, strategy: str) -> None:
    said = f"is for strategies split-replay, .* name is '{strategy}', which trains without a cloud; leave it out"
    with pytest.raises(ConfigError, match=said) as error:
        load_scenario(
            written(
                tmp_path, "[edgecloud]\nlink = 'wifi'\n", SPLIT.replace("split-replay", strategy)
            )
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["edges = 1", "edge_device = 'raspberry-pi-4b'"])
def test_the_edges_are_the_clusters(tmp_path: Path, key: str) -> None:
    """There is no number of edges in `[edgecloud]`, and none beside groups."""
    with pytest.raises(ConfigError, match=f"unknown key '{key.partition(' ')[0]}'"):
        load_scenario(written(tmp_path, f"[edgecloud]\n{key}\n"))
