from __future__ import annotations

import pytest
import torch

from native.kernel_runner import ISAS, use_isa


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """torch's thread pool costs more than it brings on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set of the kernels that this processor runs, in use for the test."""
    with use_isa(request.param):
        yield request.param


@pytest.fixture
def flush_denormals():
    """torch.set_flush_denormal(True) on this thread while the test runs."""
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    yield
    torch.set_flush_denormal(False)
