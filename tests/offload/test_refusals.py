"""What is refused, by name, before anything is changed."""

from __future__ import annotations

import pytest
import torch
from statestream import CPUOffloadOptimizer, FusedAdam
from torch._subclasses.fake_tensor import FakeTensorMode

from .conftest import make_params, set_grads, train

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

CHUNK = 60_000


def test_capturable_and_differentiable_are_refused_by_name():
    with pytest.raises(ValueError, match="FusedAdam: capturable=True"):
        CPUOffloadOptimizer(FusedAdam(make_params(), capturable=True))
    with pytest.raises(ValueError, match="AdamW: capturable=True"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params(), capturable=True))
    with pytest.raises(ValueError, match="differentiable=True"):
        CPUOffloadOptimizer(torch.optim.AdamW(make_params(), differentiable=True))


@pytest.mark.parametrize(("bytes_", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_budget_that_is_no_number_of_bytes_is_refused(bytes_, error):
    inner = FusedAdam(make_params())
    form = inner.state_format
    with pytest.raises(error, match="step_chunk_bytes"):
        CPUOffloadOptimizer(inner, bytes_)
    assert inner.state_format is form, "a refused optimizer was changed"


def test_only_an_optimizer_and_only_once():
    with pytest.raises(TypeError, match="not a torch"):
        CPUOffloadOptimizer(make_params())
    with pytest.raises(TypeError, match="already"):
        CPUOffloadOptimizer(CPUOffloadOptimizer(FusedAdam(make_params())))


def test_parameters_on_two_devices_are_refused():
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(3, device=d)) for d in ("cpu", "cuda:0")]
        inner = torch.optim.AdamW([{"params": [p]} for p in params])
    with pytest.raises(ValueError, match="on cpu, cuda:0"):
        CPUOffloadOptimizer(inner)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_bad_gradient_is_refused_before_anything_changes():
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(FusedAdam(params), CHUNK)
    train(optimizer, params, [0])
    before = [p.detach().clone() for p in params]
    set_grads(params, 1)
    params[4].grad = torch.sparse_coo_tensor([[0]], [1.0], (1000,)).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    train(optimizer, params, [1])
