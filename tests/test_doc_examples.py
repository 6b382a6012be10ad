"""The example programs of the documentation do what the pages say."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.slow
def test_the_vendors_npu_learns_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(EXAMPLES / "vendor_npu.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    accuracy = re.search(r"accuracy (\d\.\d+)", printed)
    assert accuracy and float(accuracy.group(1)) >= 0.9
    assert "the CPU had 50 % of the samples, events: []" in printed
