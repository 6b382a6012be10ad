"""Torch on one thread: these networks are too small to share out, and its idle threads spin on the others' cores."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
