"""Muon's matrices here are small: more threads than one cost more than they bring, on a busy machine far more."""

import pytest
import torch
from offload.conftest import on_device  # noqa: F401
from offload.test_ranks import fake_ranks  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
