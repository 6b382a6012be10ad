"""The table of what goes together: a cell is run, or refused with the line that the table has."""

import math
from pathlib import Path

import pytest

from docs.combinations import PAGE, Family, cells, page, refusal, scenario_with
from socflower.errors import SocflowerError
from socflower.scenario.runner import run_to_folder
from tests.sampled_cells import sampled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_few_digits")]


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `make api`"


@pytest.mark.parametrize(
    ("family", "keys", "engine"),
    [
        pytest.param(*cell, id=f"{cell[0].title}: {' and '.join(cell[1])}, {cell[2]}")
        for cell in sampled(cells())
    ],
)
def test_a_cell(family: Family, keys: tuple[str, ...], engine: str, tmp_path: Path) -> None:
    line, out = refusal(family, *keys, engine=engine), tmp_path / "out"
    if line is not None:
        with pytest.raises(SocflowerError) as refused:
            run_to_folder(scenario_with(family, *keys), out, engine=engine, num_workers=0)
        assert line in str(refused.value) and "\n" not in line and not out.exists()
        return
    result = run_to_folder(
        scenario_with(family, *keys),
        out,
        engine=engine,
        num_workers=0 if engine == "local" else None,
    )
    assert math.isfinite(result["final_loss"]) and (
        engine == "deployment" or result["virtual_s"] > 0.0
    )
    assert (out / "report.html").exists()
