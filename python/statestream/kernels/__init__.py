"""The only door to native code: tensors in, addresses out.

Everything here takes plain (local) tensors; what is a DTensor elsewhere is its local tensor here.
A row says where one tensor's elements are; a call updates rows that share formats, settings and device.
Tensors without data (FakeTensorMode, meta) are checked as others are, and nothing is touched: they have no row.
"""

from __future__ import annotations

import importlib
import os
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statestream.device.guards import on_device
from statestream.formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    REMAINDERS,
    SCALED_FP8,
    SCALED_FP16,
    Role,
    format_of_state,
)
from statestream.formats import format_of as format_of_role
from statestream.kernels.abi import scale_address
from statestream.tensors.local import is_fake

__all__ = [
    "NONE",
    "ROW_WORDS",
    "STOCHASTIC_EXP_AVG",
    "STOCHASTIC_EXP_AVG_SQ",
    "STOCHASTIC_PARAM",
    "AdamOptions",
    "DeviceScalars",
    "Formats",
    "Gathered",
    "adam",
    "advance_steps",
    "decode",
    "encode",
    "format_of",
    "gather",
    "has_adam",
    "num_threads",
    "refresh_master",
    "row",
    "state_format_of",
]

NONE = 0
"""The code of a master that is not there."""
FLOAT32, BFLOAT16, REMAINDER, FLOAT16 = FP32.code, BF16.code, REMAINDERS.code, FP16.code
SCALED_FLOAT16, SCALED_FLOAT8 = SCALED_FP16.code, SCALED_FP8.code

STOCHASTIC_EXP_AVG, STOCHASTIC_EXP_AVG_SQ, STOCHASTIC_PARAM = 1, 2, 4
"""Flags of what an update rounds by random bits."""

_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""torch's table of C functions for reading a tensor's address and layout; torch 2.9 has none."""
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_DLPACK_CPU, _DLPACK_CUDA = 1, 2

ROW_WORDS = 8
"""64-bit words of one row (tensor_table.h): numel, param, grad, exp_avg, exp_avg_sq, master, step, spare."""


def _native(name: str, build: str):
    try:
        return importlib.import_module(f"statestream.{name}")
    except ImportError as error:
        raise ImportError(
            f"statestream.{name}, {build}statestream, cannot be imported ({error}). "
            "Build it with: pip install --force-reinstall --no-deps statestream (from a checkout: pip install .)"
        ) from error


_cpu = _native("_cpu", "the compiled part of ")


_SCALED_CODES = frozenset(f.code for f in FORMATS if f.scaled)


class Formats(NamedTuple):
    """Format codes of what one call reads and writes; NONE for a master that is not there."""

    param: int
    grad: int
    exp_avg: int
    exp_avg_sq: int
    master: int

    @property
    def has_master(self) -> bool:
        """Whether there is a master that is whole numbers, and not remainders."""
        return self.master not in (NONE, REMAINDER)

    @property
    def has_scales(self) -> bool:
        return not _SCALED_CODES.isdisjoint(self)


@dataclass(frozen=True)
class AdamOptions:
    """A param group's settings, as numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    maximize: bool


@dataclass(frozen=True)
class DeviceScalars:
    """float32 scalars on the parameters' device that an update reads when it runs, as a CUDA graph needs.

    `lr` takes the place of the option, `grad_scale` divides the gradients, and where `found_inf` is not
    zero nothing is changed, step counters included.
    """

    lr: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __post_init__(self):
        for name in ("lr", "grad_scale", "found_inf"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype is not torch.float32 or tensor.numel() != 1):
                raise ValueError(
                    f"{name}: found {tensor.dtype} of shape {tuple(tensor.shape)}; expected one torch.float32"
                )


def format_of(tensor: Tensor) -> int:
    """The code of a parameter's or a gradient's dtype; KeyError for a dtype that no kernel reads."""
    return format_of_role(Role.PARAMETER, tensor.dtype).code


def state_format_of(tensor: Tensor) -> int:
    """The code of a moment's or a master's dtype. KeyError for others."""
    return format_of_state(tensor.dtype).code


def num_threads() -> int:
    """CPU threads a call may use: STATESTREAM_NUM_THREADS, or else torch's intra-op count."""
    wanted = os.environ.get("STATESTREAM_NUM_THREADS")
    if not wanted:
        return torch.get_num_threads()
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"STATESTREAM_NUM_THREADS: {wanted!r} is not valid; give a number of threads")
    return int(wanted)


def row(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: Tensor
) -> tuple[int, ...]:
    """One row: the addresses of tensors that hold the same elements in the same order; none for fake ones.

    ValueError where their counts differ.
    """
    for name, tensor in (("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("master_param", master)):
        if tensor is not None and tensor.numel() != param.numel():
            raise ValueError(f"{name}: found {tensor.numel()} elements; expected the parameter's {param.numel()}")
    if step.numel() != 1:
        raise ValueError(f"step: found {step.numel()} elements; expected one counter")
    if any(is_fake(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq)):
        return ()
    return (
        param.numel(),
        param.data_ptr(),
        grad.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        0 if master is None else master.data_ptr(),
        step.data_ptr(),
        0,
    )


class Gathered(NamedTuple):
    """Rows of one call, their extras (scales, and indices of whole tensors), the parameters and their local tensors:
    the same list where none of them is sharded."""

    device: torch.device
    formats: Formats
    rows: array
    extras: array
    params: list[Tensor]
    locals: list[Tensor]


def gather(
    params: list[Tensor],
    grad_name: str,
    states: Mapping[Tensor, dict],
    *,
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
    masters: Mapping[torch.dtype, torch.dtype | None],
    step_on_device: bool,
    scales: dict[Tensor, dict[str, Tensor]],
    sharded: bool,
    extras: bool,
    first_ordinal: int,
) -> tuple[list[Gathered], list[int]]:
    """Rows of every parameter that is a contiguous tensor with a gradient and states to match.

    Returns the calls to make, and the indices of parameters with a gradient that need a closer look: other layouts,
    subclasses, whatever is wrong, and unless `sharded` DTensors. `masters` says by a parameter's dtype which dtype its
    master is stored in, None for none. With `extras` rows have some, for which `scales` are
    those of scaled states by name, and `first_ordinal` is the number of params[0].
    Nothing is remembered between calls, so no change of a tensor can be missed. A parameter without
    gradient is passed over, one that is listed twice is taken once.
    """
    if _EXCHANGE is None:
        first = {id(p): i for i, p in reversed(list(enumerate(params)))}
        return [], [i for i in sorted(first.values()) if getattr(params[i], grad_name, None) is not None]
    # Where no one has imported DTensors there are none.
    dtensors = sys.modules.get("torch.distributed.tensor") if sharded else None
    found, left = _cpu.gather(
        _EXCHANGE,
        params,
        grad_name,
        states,
        _PLAIN_TYPES,
        sharded_type=getattr(dtensors, "DTensor", None),
        scales=scales,
        exp_avg=format_of_state(exp_avg).code,
        exp_avg_sq=format_of_state(exp_avg_sq).code,
        masters={
            format_of_role(Role.PARAMETER, dtype).code: format_of_state(master).code
            for dtype, master in masters.items()
            if master is not None
        },
        step_on_device=step_on_device,
        extras=extras,
        first_ordinal=first_ordinal,
    )
    calls = []
    for device_type, index, formats, rows, more, members, locals in found:
        device = torch.device("cpu") if device_type == _DLPACK_CPU else torch.device("cuda", index)
        calls.append(Gathered(device, Formats(*formats), array("q", rows), array("q", more), members, locals))
    return calls, left


def has_adam(device: torch.device, formats: Formats) -> bool:
    """Whether the device has a kernel for these formats."""
    return _module_for(device).has_adam(tuple(formats))


def adam(
    device: torch.device,
    rows: array,
    formats: Formats,
    options: AdamOptions,
    *,
    grad_scale: float = 1.0,
    advance: bool = True,
    scalars: DeviceScalars | None = None,
    threads: int | None = None,
    extras: array | None = None,
    seed: int = 0,
    stochastic: int = 0,
) -> None:
    """Updates every row in place, once; on CUDA it is queued on the current stream.

    `rows` is an array('q') of ROW_WORDS a row. `grad_scale` divides the gradients. `advance` adds one
    to each row's step counter first; without it the counters are used as they stand, for callers that
    update one parameter in several calls. Step counters are in host memory, unless `scalars` is given:
    then they are on the device, each row's own, and the host reads nothing.

    `extras` is an array('q') of a abi.extras_row a row, needed where a format is scaled or something
    is rounded by random bits: the tensors of the flags `stochastic` (each stored as bfloat16 or scaled, a
    param without master), and an exp_avg_sq in a scaled format always. The bits hang on `seed` (64 bits),
    the row's ordinal and step, and each element's global index. ValueError where extras are missing, not
    one a row, or scales are; where a flag is of a tensor that takes none; where a scaled row does not start
    a block.
    """
    if not rows:
        return
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: found {seed}; expected an integer of 64 bits, from 0 on")
    if device.type == "cpu" and scalars is not None:
        if scalars.found_inf is not None and scalars.found_inf.item():
            return
        if scalars.lr is not None:
            options = replace(options, lr=scalars.lr.item())
        if scalars.grad_scale is not None:
            grad_scale *= scalars.grad_scale.item()
    where: dict[str, Any] = {"threads": threads or num_threads()}
    if device.type == "cuda":
        where = _place(device)
        if scalars is not None:
            rooms = len(rows) // ROW_WORDS * _cuda_for(device).SCRATCH_BYTES
            scratch = torch.empty(max(rooms, 1), dtype=torch.uint8, device=device)
            where.update(
                capturable=True,
                scratch_address=scratch.data_ptr(),
                lr_address=_address(scalars.lr, device),
                grad_scale_address=_address(scalars.grad_scale, device),
                found_inf_address=_address(scalars.found_inf, device),
            )
    if extras is not None or stochastic:
        where.update(extras=extras, seed=seed, stochastic=stochastic)
    with on_device(device):
        _module_for(device).adam(
            rows,
            tuple(formats),
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            decoupled=options.decoupled,
            bias_correction=options.bias_correction,
            maximize=options.maximize,
            grad_scale=grad_scale,
            advance=advance,
            **where,
        )


def advance_steps(device: torch.device, steps: list[Tensor], found_inf: Tensor | None = None) -> None:
    """Adds one to each float32 counter on the device, unless `found_inf`, a float32 there, is not zero."""
    steps = [step for step in steps if not is_fake(step)]
    if not steps:
        return
    if device.type == "cpu":
        if found_inf is None or not found_inf.item():
            for step in steps:
                step.add_(1)
        return
    counters = array("q", [_address(step, device) for step in steps])
    with on_device(device):
        _module_for(device).advance_steps(counters, **_place(device), found_inf_address=_address(found_inf, device))


def decode(state: Tensor, out: Tensor, *, scale: Tensor | None = None, root: bool = False, first: int = 0) -> None:
    """Writes the FP32 values of a contiguous 1-D slice of a state into `out`, same device, same count.

    Of a scaled state `scale` holds the whole tensor's scales, and the slice is element
    `first` on, whole blocks of 256; with `root` it holds square roots, as exp_avg_sq does.
    """
    _check_slice(state, out)
    code, where = _stored(state, scale, first, root)
    if is_fake(state) or is_fake(out):
        return
    _convert(state.device, "decode", code, state.data_ptr(), out.data_ptr(), state.numel(), **where)


def encode(values: Tensor, state: Tensor, *, scale: Tensor | None = None, root: bool = False, first: int = 0) -> None:
    """Writes FP32 `values` into a contiguous 1-D slice of a state, rounding to its format's nearest.

    Of a scaled state the slice's part of `scale` is written as well; the arguments are those of decode.
    """
    _check_slice(state, values)
    code, where = _stored(state, scale, first, root)
    if is_fake(state) or is_fake(values):
        return
    _convert(state.device, "encode", code, values.data_ptr(), state.data_ptr(), state.numel(), **where)


def refresh_master(param: Tensor, master: Tensor, *, scale: Tensor | None = None, first: int = 0) -> None:
    """Where the master (float32, or float16 with its `scale`) does not round to the bfloat16 or float16
    parameter, the parameter's value replaces it. `scale` and `first` are as in decode.

    ValueError where their counts differ.
    """
    if master.numel() != param.numel():
        raise ValueError(f"master_param: found {master.numel()} elements; expected the parameter's {param.numel()}")
    code, where = _stored(master, scale, first)
    if (param.dtype, code) != (torch.bfloat16, FLOAT32):
        where.update(param_format=format_of(param), master_format=code)
    if is_fake(param) or is_fake(master):
        return
    _convert(param.device, "refresh_master", param.data_ptr(), master.data_ptr(), param.numel(), **where)


def _convert(device: torch.device, what: str, *arguments: int, **options: int) -> None:
    where = _place(device) if device.type == "cuda" else {"threads": num_threads()}
    with on_device(device):
        getattr(_module_for(device), what)(*arguments, **where, **options)


def _stored(state: Tensor, scale: Tensor | None, first: int, root: bool = False) -> tuple[int, dict[str, int]]:
    """The code of a state, and what a conversion is told of its scales."""
    code = state_format_of(state)
    if code not in _SCALED_CODES:
        if scale is not None or root:
            raise ValueError(f"scale: a state of {state.dtype} has no scales, and holds no roots")
        return code, {}
    if scale is None:
        raise ValueError(f"scale: a state of {state.dtype} needs the float32 scales of its blocks of 256 elements")
    if scale.device != state.device:
        raise ValueError(f"scale: found on {scale.device}; expected on {state.device}, where the state is")
    where = {"scale": scale_address("scale", scale, first, state.numel())}
    return code, {**where, "root": True} if root else where


def _check_slice(state: Tensor, values: Tensor) -> None:
    if values.dtype is not torch.float32 or values.numel() != state.numel() or values.device != state.device:
        raise ValueError(
            f"a slice of {state.numel()} elements on {state.device} is converted from or to as many FP32 "
            f"values there, not {values.numel()} of {values.dtype} on {values.device}"
        )


def _module_for(device: torch.device):
    if device.type == "cpu":
        return _cpu
    if device.type == "cuda":
        return _cuda_for(device)
    raise RuntimeError(f"statestream has no kernels for tensors on {device}")


@cache
def _cuda_for(device: torch.device):
    """The CUDA module, once it is known to run on this device."""
    cuda = _native("_cuda", "the CUDA part of ")
    with on_device(device):
        reason = cuda.why_not(_index(device))
    if reason:
        raise RuntimeError(f"statestream cannot run on {device}: {reason}")
    return cuda


def _place(device: torch.device) -> dict[str, int]:
    """The device's number, and the stream that the caller's work is on."""
    return {"device": _index(device), "stream": torch.cuda.current_stream(device).cuda_stream}


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _address(scalar: Tensor | None, device: torch.device) -> int:
    if scalar is None:
        return 0
    if scalar.device != device or scalar.dtype is not torch.float32:
        raise ValueError(f"expected a torch.float32 scalar on {device}, found {scalar.dtype} on {scalar.device}")
    return scalar.data_ptr()
