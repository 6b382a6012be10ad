"""What all tests take for granted, and the processes that they start: waiting threads, signals, and what is drawn."""

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.command_line import socflower  # noqa: F401 - a fixture
from tests.few_digits import on_few_digits  # noqa: F401 - a fixture
from tests.quick_plots import drawn, quick_plots, with_pictures  # noqa: F401 - fixtures

# A test process has one core: threads of torch and OpenBLAS would take it, spinning, from the other test process, and
# the models and racks of tests are too small to gain from them. What more threads compute is tested where a test sets
# their number. The libraries read this as they are loaded; the processes that tests start inherit it.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Data come from SOCFLOWER_DATA or are embedded: no test downloads any.
os.environ["HF_HUB_OFFLINE"] = "1"

# Where tests run behind nohup, or as a job of a shell without job control, these are ignored, and every process that a
# test starts would inherit that.
if threading.current_thread() is threading.main_thread():
    for _number, _default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _default)

# A loaded machine must not fail a property: no deadline for an example, and slow drawing is no fault of a strategy.
# Examples are the same in every run, so that a change fails by its own fault and anybody can see the failure again.
# Other examples, and five times as many, are looked for where a failure surprises nobody: `make test-random` takes
# "exploring", with a seed.
_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("reproducible", _common, derandomize=True, max_examples=20)
settings.register_profile("exploring", _common, max_examples=100)
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def flower_logs_as_before() -> Iterator[None]:
    """Undo `quiet_flower` after a test: others read the log, in whatever order they run."""
    levels = {handler: handler.level for handler in logging.getLogger("flwr").handlers}
    yield
    for handler, level in levels.items():
        handler.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported and collected out of the garbage collector, which would visit it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # A training makes hundreds of thousands of objects that live as long as it; visiting them took a twentieth.
        gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cells as slow where a test has many (`few_cells`), and begin `make test-slow` with what may take longest."""
    _leave_cells_to_slow_tests(items)
    if config.getoption("-m") == "slow":
        # No worker waits for one of these at the end.
        items.sort(key=_most_seconds, reverse=True)


def _leave_cells_to_slow_tests(items: Iterable[pytest.Item]) -> None:
    """Leave `few_cells(count)` of a test's quick cells, spread over its table, and mark the others as slow."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few_cells") and not item.get_closest_marker("slow"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in by_test.values():
        marker = cells[0].get_closest_marker("few_cells")
        assert marker is not None
        (count,) = marker.args
        kept = {number * len(cells) // count for number in range(count)}
        for number, item in enumerate(cells):
            if number not in kept:
                item.add_marker("slow")


def _most_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None and marker.args else 0.0
