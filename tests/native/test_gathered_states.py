"""States in scaled formats as the native reader of many tensors finds them."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from statestream import FusedAdam, kernels
from statestream.tensors.global_index import WHOLE

from native.kernel_runner import BF16, F16, F32, I16, U8

pytestmark = pytest.mark.skipif(kernels._EXCHANGE is None, reason="this torch has no exchange of many tensors")


NAMES = ("exp_avg", "exp_avg_sq", "master_param")
PLAIN = {
    "exp_avg": F32,
    "exp_avg_sq": F32,
    "masters": {},
    "step_on_device": False,
    "scales": {},
    "sharded": True,
    "extras": False,
}


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
        masters={BF16: master},
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


# ---- states are found whatever their order in the mapping ----


def plain_state() -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}


def parameters(without_gradient: tuple[int, ...] = ()) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(12)]
    for i, param in enumerate(params):
        param.grad = None if i in without_gradient else torch.zeros(3)
    return params


class Elsewhere(dict):
    """A mapping that looks like a dictionary of states, but hands out others."""

    def __init__(self, held: dict, handed_out: dict):
        super().__init__(held)
        self.handed_out = handed_out

    def __getitem__(self, key):
        return self.handed_out[key]


def in_order(params):
    return {p: plain_state() for p in params}


MAPPINGS = {
    "in the parameters' order": in_order,
    "in reverse": lambda params: in_order(params[::-1]),
    "turned": lambda params: in_order(params[5:] + params[:5]),
    "of more parameters, before": lambda params: in_order(parameters() + params),
    "of more parameters, between": lambda params: in_order([p for q in params for p in (torch.zeros(3), q)]),
    "with other keys between": lambda params: {k: v for p in params for k, v in ((f"a{id(p)}", 1), (p, plain_state()))},
    "with many other keys": lambda params: {**{f"key {i}": i for i in range(40)}, **in_order(params)},
    "with gaps where others were": lambda params: without(in_order(parameters() + params), 12),
    "handed out by a subclass": lambda params: Elsewhere(in_order(params), in_order(params)),
    "no dictionary": lambda params: MappingProxyType(in_order(params)),
}


def without(states: dict, first: int) -> dict:
    for key in list(states)[:first]:
        del states[key]
    return states


@pytest.mark.parametrize("first_ordinal", [0, 12, -1])
@pytest.mark.parametrize("without_gradient", [(), (0, 1, 2, 3, 4, 5, 6), (4, 11)], ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_each_parameter_has_its_own_state_whatever_the_order(mapping, without_gradient, first_ordinal):
    params = parameters(without_gradient)
    states = MAPPINGS[mapping](params)
    (call,), left = kernels.gather(params, "grad", states, first_ordinal=first_ordinal, **PLAIN)
    stepped = [param for i, param in enumerate(params) if i not in without_gradient]
    assert left == [] and list(map(id, call.params)) == list(map(id, stepped))
    for i, param in enumerate(stepped):
        found = call.rows[8 * i : 8 * i + 8].tolist()
        assert found[1] == param.data_ptr()
        assert [found[3], found[4], found[6]] == [
            states[param][name].data_ptr() for name in ("exp_avg", "exp_avg_sq", "step")
        ]


def hashes_of(monkeypatch, work) -> int:
    """How often `work` hashes a tensor, which is a call into Python."""
    count = [0]

    def counted(tensor, of=torch.Tensor.__hash__):
        count[0] += 1
        return of(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__hash__", counted)
        work()
    return count[0]


def test_a_step_in_the_order_of_the_states_hashes_no_parameter(monkeypatch):
    first, second = parameters(), parameters()
    optimizer = FusedAdam([{"params": first}, {"params": second}])
    optimizer.step()  # makes the states, which takes a look at each
    assert hashes_of(monkeypatch, optimizer.step) == 0
    for param in (*first[3:9], *second[::2]):
        param.grad = None
    assert hashes_of(monkeypatch, optimizer.step) == 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert hashes_of(monkeypatch, optimizer.step) == 0


def test_a_state_that_was_exchanged_is_the_one_that_is_stepped():
    params = parameters()
    optimizer = FusedAdam(params)
    optimizer.step()
    for param in params[::3]:
        exchanged = {name: value.clone() for name, value in optimizer.state[param].items()}
        exchanged["step"].fill_(10)
        optimizer.state[param] = exchanged
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [11, 2, 2] * 4
