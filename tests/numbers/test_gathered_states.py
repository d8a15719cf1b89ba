"""States in scaled formats as the native reader of many tensors finds them."""

from __future__ import annotations

import pytest
import torch
from kernel_runner import BF16, F16, F32, I16, U8
from statestream import kernels
from statestream.row_extras import WHOLE

pytestmark = pytest.mark.skipif(kernels._EXCHANGE is None, reason="this torch has no exchange of many tensors")


NAMES = ("exp_avg", "exp_avg_sq", "master_param")


def gathered(stored: tuple[torch.dtype, ...], expected: tuple[torch.dtype, ...], scales: dict | None = None):
    """gather of one BF16 parameter with exp_avg, exp_avg_sq and a master in these dtypes, number 7 of all."""
    param = torch.nn.Parameter(torch.zeros(300, dtype=BF16))
    param.grad = torch.zeros(300, dtype=BF16)
    state = {name: torch.zeros(300, dtype=dtype) for name, dtype in zip(NAMES, stored, strict=True)}
    state["step"] = torch.tensor(0.0)
    exp_avg, exp_avg_sq, master = expected
    if scales is None:
        scales = {name: torch.ones(2) for name, dtype in zip(NAMES, stored, strict=True) if dtype in (F16, U8)}
    calls, left = kernels.gather(
        [param],
        "grad",
        {param: state},
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        master=master,
        step_on_device=False,
        scales={param: scales},
        sharded=True,
        extras=True,
        first_ordinal=7,
    )
    return calls, left, (param, state, scales)


@pytest.mark.parametrize(
    "stored, codes",
    [
        ((U8, F16, F16), (kernels.SCALED_FLOAT8, kernels.SCALED_FLOAT16, kernels.SCALED_FLOAT16)),
        ((F16, U8, F32), (kernels.SCALED_FLOAT16, kernels.SCALED_FLOAT8, kernels.FLOAT32)),
        ((BF16, F32, I16), (kernels.BFLOAT16, kernels.FLOAT32, kernels.REMAINDER)),
    ],
)
def test_a_states_dtype_says_how_it_is_stored(stored, codes):
    (call,), left, (param, state, scales) = gathered(stored, stored)
    assert left == []
    assert call.params[0] is param and call.locals[0] is param
    assert call.formats == (kernels.BFLOAT16, kernels.BFLOAT16, *codes)
    assert tuple(map(kernels.state_format_of, list(state.values())[:3])) == codes
    assert call.rows.tolist()[3:7] == [state[name].data_ptr() for name in (*NAMES, "step")]
    assert call.rows[0] == param.numel()
    addresses = [scales[name].data_ptr() if name in scales else 0 for name in NAMES]
    assert call.extras.tolist() == [*addresses, 7, 0, *WHOLE, 0]


@pytest.mark.parametrize("stored", [(U8, F16, F32), (F16, F16, F16), (BF16, F32, F32), (torch.int8, U8, F32)])
def test_a_state_of_another_dtype_is_left_for_a_closer_look(stored):
    calls, left, _ = gathered(stored, (F16, U8, F32))
    assert (calls, left) == ([], [0])


@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"exp_avg": torch.ones(2)},
        {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(1)},
        {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(3)},
        {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2, dtype=torch.float64)},
        {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(4)[::2]},
        {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2, device="meta")},
        {"exp_avg": torch.ones(2), "exp_avg_sq": None},
    ],
    ids=str,
)
def test_a_state_whose_scales_do_not_fit_is_left_for_a_closer_look(scales):
    calls, left, _ = gathered((F16, U8, F32), (F16, U8, F32), scales)
    assert (calls, left) == ([], [0])
