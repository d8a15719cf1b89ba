"""With lr=0 and no decay a step changes no weight, whatever bits it has and however it and its state are stored."""

import pytest
import torch
from helpers.modes import BF16, FORMS, FP16, FP32
from statestream import CPUOffloadOptimizer, FusedAdam

PATTERNS = {BF16: torch.int16, FP16: torch.int16, FP32: torch.int32}
ELEMENTS = 20_000


def of_any_bits(dtype, seed=0):
    """Finite values of every exponent, denormals and zeros among them, in no order."""
    generator = torch.Generator().manual_seed(seed)
    bits = 32 if dtype is FP32 else 16
    patterns = torch.randint(-(1 << bits - 1), 1 << bits - 1, (ELEMENTS,), generator=generator)
    values = patterns.to(PATTERNS[dtype]).view(dtype)
    values[: ELEMENTS // 50] = 0
    return torch.where(values.isfinite(), values, 1.0)[torch.randperm(ELEMENTS, generator=generator)]


def near_each_other(dtype):
    """Magnitudes of a block within 2**32: what an FP16 master and its scale hold of bfloat16 without loss."""
    generator = torch.Generator().manual_seed(1)
    magnitudes = 2.0 ** torch.randint(-31, 1, (ELEMENTS,), generator=generator).double()
    magnitudes *= 1 + torch.rand(ELEMENTS, generator=generator) * 0.99
    return (magnitudes * torch.randn(ELEMENTS, generator=generator).sign()).to(dtype)


@pytest.mark.parametrize("offload", [False, True], ids=["live", "streamed"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_step_with_no_learning_rate_changes_no_weight(form, offload):
    small_master = form.master == "fp16"
    params = [
        torch.nn.Parameter(near_each_other(dtype) if small_master and dtype is BF16 else of_any_bits(dtype))
        for dtype in form.param_dtypes
    ]
    before = [param.detach().clone() for param in params]
    optimizer = FusedAdam(params, lr=0.0, weight_decay=0.0, **form.arguments)
    if offload:
        optimizer = CPUOffloadOptimizer(optimizer, 64 * 1024)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(ELEMENTS, generator=generator).to(param.dtype)
        optimizer.step()
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)  # 0.0 may have taken the other sign, as in torch


def test_control_a_step_with_a_learning_rate_would_be_seen():
    param = torch.nn.Parameter(near_each_other(BF16))
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    FusedAdam([param], lr=1e-9, master_weights=True, master_weight_dtype=FP16).step()
    assert not torch.equal(param, before)
