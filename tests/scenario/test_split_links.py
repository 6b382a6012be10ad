from pathlib import Path

import pytest

from socflower.edgecloud.link_trace import segments
from socflower.edgecloud.trace_files import read_csv
from socflower.errors import ConfigError
from socflower.scenario.scenario_file import from_document, load_scenario, to_document
from socflower.scenario.split_links import edge_links

SPLIT = '# Does it pay?\nschema = 1\n[strategy]\nname = "split-replay"\n[edgecloud]\n'


def scenario(folder: Path, table: str):  # type: ignore[no-untyped-def]
    path = folder / "split.toml"
    path.write_text(SPLIT + table)
    return load_scenario(path)


def test_a_recorded_link_travels_in_the_resolved_document(tmp_path: Path) -> None:
    (tmp_path / "walk.csv").write_text("time_s,up_bytes_per_s,down_bytes_per_s\n0,1e6,2e6\n3,5e5,1e6\n7,,\n")
    loaded = scenario(tmp_path, 'link = "walk.csv"\nlatency_s = 0.0\n')
    (tmp_path / "walk.csv").rename(tmp_path / "gone.csv")
    (link,) = edge_links(from_document(to_document(loaded)), 1)
    recorded = read_csv(tmp_path / "gone.csv")
    for time_s in (0.0, 2.9, 3.1, 6.9, 7.1, 10.5):
        assert link.rates(time_s) == recorded.rates(time_s)


def test_edges_have_links_of_their_own(tmp_path: Path) -> None:
    wifi, other = edge_links(scenario(tmp_path, 'link = "wifi"\n'), 2)
    assert wifi != other
    slow, fast = edge_links(scenario(tmp_path, 'links = ["4g-foot", "constant"]\nup_bytes_per_s = 1e6\n'
                                               'down_bytes_per_s = 2e6\n'), 2)
    assert fast.rates(0.0).down_bytes_per_s == 2e6
    assert slow != fast


def test_segments_are_taken_as_they_stand(tmp_path: Path) -> None:
    (link,) = edge_links(scenario(tmp_path, "segments = [[10, 1e6, 2e6], [5, 0, 0]]\nlatency_s = 0.01\n"), 1)
    assert link == segments([(10.0, 1e6, 2e6), (5.0, 0.0, 0.0)], latency_s=0.01)


@pytest.mark.parametrize(("table", "said"), [
    ('link = "wify"\n', "did you mean"),
    ('links = ["wifi"]\n', "1 for 2 edges"),
    ('link = "missing.csv"\n', "missing.csv"),
    ('link = "a.csv"\nsegments = [[1, 1, 1]]\n', "keep one"),
])
def test_a_link_that_cannot_be_is_one_line(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        edge_links(scenario(tmp_path, table), 2)
    assert "\n" not in str(error.value)
