"""Flower's simulation on a machine with GPUs, which Ray hides from workers that do not ask for them."""

import pytest

from socflower.engines.simulation import gpu_resources


@pytest.mark.parametrize(
    ("num_workers", "kind", "count", "setting"),
    [
        (4, "", 0, ""),
        (4, "mps", 1, ""),
        (4, "cuda", 1, " client-resources-num-gpus=0.25"),
        (3, "cuda", 1, " client-resources-num-gpus=0.333"),
        (2, "cuda", 8, " client-resources-num-gpus=1.0"),
    ],
)
def test_workers_share_the_gpus(num_workers: int, kind: str, count: int, setting: str) -> None:
    assert gpu_resources(num_workers, kind, count) == setting
