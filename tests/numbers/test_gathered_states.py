"""States in scaled formats as the native reader of many tensors finds them."""

from __future__ import annotations

import pytest
import torch
from kernel_runner import BF16, F16, F32, I16, U8
from statestream import kernels

pytestmark = pytest.mark.skipif(kernels._EXCHANGE is None, reason="this torch has no exchange of many tensors")


def gathered(stored: tuple[torch.dtype, ...], expected: tuple[torch.dtype, ...]):
    """gather of one BF16 parameter with exp_avg, exp_avg_sq and a master in these dtypes."""
    param = torch.nn.Parameter(torch.zeros(300, dtype=BF16))
    param.grad = torch.zeros(300, dtype=BF16)
    names = ("exp_avg", "exp_avg_sq", "master_param")
    state = {name: torch.zeros(300, dtype=dtype) for name, dtype in zip(names, stored, strict=True)}
    state["step"] = torch.tensor(0.0)
    exp_avg, exp_avg_sq, master = expected
    calls, left = kernels.gather(
        [param], "grad", {param: state}, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, master=master, step_on_device=False
    )
    return calls, left, (param, state)


@pytest.mark.parametrize(
    "stored, codes",
    [
        ((U8, F16, F16), (kernels.SCALED_FLOAT8, kernels.SCALED_FLOAT16, kernels.SCALED_FLOAT16)),
        ((F16, U8, F32), (kernels.SCALED_FLOAT16, kernels.SCALED_FLOAT8, kernels.FLOAT32)),
        ((BF16, F32, I16), (kernels.BFLOAT16, kernels.FLOAT32, kernels.REMAINDER)),
    ],
)
def test_a_states_dtype_says_how_it_is_stored(stored, codes):
    calls, left, (param, state) = gathered(stored, stored)
    ((_, formats, rows, indices),) = calls
    assert (left, indices) == ([], [0])
    assert formats == (kernels.BFLOAT16, kernels.BFLOAT16, *codes)
    assert tuple(map(kernels.state_format_of, list(state.values())[:3])) == codes
    names = ("exp_avg", "exp_avg_sq", "master_param", "step")
    assert rows.tolist()[3:7] == [state[name].data_ptr() for name in names]
    assert rows[0] == param.numel()


@pytest.mark.parametrize("stored", [(U8, F16, F32), (F16, F16, F16), (BF16, F32, F32), (torch.int8, U8, F32)])
def test_a_state_of_another_dtype_is_left_for_a_closer_look(stored):
    calls, left, _ = gathered(stored, (F16, U8, F32))
    assert (calls, left) == ([], [0])
