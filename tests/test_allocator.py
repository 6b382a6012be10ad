"""Memory that is kept between batches."""

import platform
import resource
import subprocess
import sys

import pytest

ROUNDS = """
import resource
import numpy as np
from socflower.allocator import keep_freed_memory
{first}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [np.ones(4 << 20, np.uint8) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
PAGES_OF_A_ROUND = 4 * (4 << 20) // resource.getpagesize()


def page_faults(first: str, **environment: str) -> int:
    printed = subprocess.run(
        [sys.executable, "-c", ROUNDS.format(first=first)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return int(printed)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc; there is nothing to set"
)
def test_memory_freed_by_a_batch_is_there_for_the_next_without_page_faults() -> None:
    assert page_faults("keep_freed_memory()") < PAGES_OF_A_ROUND / 10


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc; there is nothing to set"
)
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_a_threshold_that_the_user_has_set_stays(name: str) -> None:
    assert page_faults("keep_freed_memory()", **{name: "65536"}) > PAGES_OF_A_ROUND
