"""What tests of clients share."""

from collections.abc import Iterator

import pytest
import torch

from socflower.flower_adapter import begin_run


@pytest.fixture
def one_run_and_thread() -> Iterator[None]:
    """Let messages belong to a run, and torch use one thread, as a client does."""
    begin_run(1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
