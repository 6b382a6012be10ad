from pathlib import Path

import pytest

from socflower.edgecloud.links.bandwidth_profile import read_csv, segments
from socflower.scenario.schema.file import from_document, load_scenario, to_document
from socflower.scenario.schema.links import edge_links
from socflower.scenario.schema.scenario_file import Scenario
from tests.one_line import refused

SPLIT = '# Does it pay?\nschema = 1\n[strategy]\nname = "split-replay"\n[edgecloud]\n'


def scenario(folder: Path, table: str, head: str = "") -> Scenario:
    path = folder / "split.toml"
    path.write_text(SPLIT.replace("schema = 1\n", f"schema = 1\n{head}") + table)
    return load_scenario(path)


def test_a_recorded_link_travels_in_the_resolved_document(tmp_path: Path) -> None:
    (tmp_path / "walk.csv").write_text(
        "time_s,up_bytes_per_s,down_bytes_per_s\n0,1e6,2e6\n3,5e5,1e6\n7,,\n"
    )
    loaded = scenario(tmp_path, 'link = "walk.csv"\nlatency_s = 0.0\n')
    (tmp_path / "walk.csv").rename(tmp_path / "gone.csv")
    (link,) = edge_links(from_document(to_document(loaded)), 1)
    recorded = read_csv(tmp_path / "gone.csv")
    for time_s in (0.0, 2.9, 3.1, 6.9, 7.1, 10.5):
        assert link.rates(time_s) == recorded.rates(time_s)


def test_edges_have_links_of_their_own(tmp_path: Path) -> None:
    wifi, other = edge_links(scenario(tmp_path, 'link = "wifi"\n'), 2)
    assert wifi != other
    slow, fast = edge_links(
        scenario(
            tmp_path,
            'link = ["4g-foot", "constant"]\nbytes_per_s = [1e6, 2e6]\n',
        ),
        2,
    )
    assert fast.rates(0.0).down_bytes_per_s == 2e6
    assert slow != fast


def test_segments_are_taken_as_they_stand(tmp_path: Path) -> None:
    (link,) = edge_links(
        scenario(tmp_path, "segments = [[10, 1e6, 2e6], [5, 0, 0]]\nlatency_s = 0.01\n"), 1
    )
    assert link == segments([(10.0, 1e6, 2e6), (5.0, 0.0, 0.0)], latency_s=0.01)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('link = "wify"\n', "did you mean"),
        ('link = ["wifi"]\n', "1 for 2 edges"),
        ('link = "missing.csv"\n', "missing.csv"),
        ('link = "a.csv"\nsegments = [[1, 1, 1]]\n', "segments"),
    ],
)
def test_a_link_that_cannot_be_is_one_line(tmp_path: Path, table: str, named: str) -> None:
    refused(lambda: edge_links(scenario(tmp_path, table), 2), named)


@pytest.mark.parametrize(
    "table",
    [
        'link = "4g-tram"\n',
        "segments = [[60, 1e5, 1e5], [30, 0, 0]]\njitter = 0.1\n",
        'link = "constant"\nbytes_per_s = [1e6, 2e6]\njitter = 0.2\n',
    ],
)
def test_what_is_random_in_a_link_follows_the_seed(tmp_path: Path, table: str) -> None:
    first, second = (
        edge_links(scenario(tmp_path, table, f"seed = {seed}\n"), 2) for seed in (1, 2)
    )
    assert first[1] == second[0]  # edge i takes the seed and i
    assert len({id(link) for link in first}) == 2 and first[0] != first[1]
    resolved = from_document(to_document(scenario(tmp_path, table, "seed = 2\n")))
    assert edge_links(resolved, 2) == second


def test_the_world_of_the_moving_link_follows_the_seed() -> None:
    """Its virtual time was the same for all seeds."""
    path = Path(__file__).parents[3] / "scenarios" / "split_moving_link.toml"
    links = [edge_links(load_scenario(path, [f"seed={seed}"]), 1) for seed in (1, 2, 3)]
    assert len({link[0].up.bytes_per_s for link in links}) == 3
    assert all(
        link[0].up.rate(340.0) == 0.0 for link in links
    )  # the loss is a loss in each of them
