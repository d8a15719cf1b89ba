"""The only door to native code: tensors in, addresses out.

Everything here takes plain (local) tensors; what is a DTensor elsewhere is its local tensor here.
A row says where one tensor's elements are; a call updates rows that share formats, settings and device.
Tensors without data (FakeTensorMode, meta) are checked as others are, and nothing is touched: they have no row.
"""

from __future__ import annotations

import importlib
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statestream.tensors import is_fake

__all__ = [
    "NONE",
    "ROW_WORDS",
    "AdamOptions",
    "DeviceScalars",
    "Formats",
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
]

NONE, FLOAT32, BFLOAT16, REMAINDER = 0, 1, 2, 3
"""Codes of number_formats.h."""

_CODES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int16: REMAINDER}

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


class Formats(NamedTuple):
    """Format codes of what one call reads and writes; NONE for a master that is not there."""

    param: int
    grad: int
    exp_avg: int
    exp_avg_sq: int
    master: int


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
    """The code of a tensor's dtype; KeyError for a dtype that no kernel stores."""
    return _CODES[tensor.dtype]


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


def gather(
    params: list[Tensor],
    grad_name: str,
    states: Mapping[Tensor, dict],
    *,
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
    master: torch.dtype | None,
    step_on_device: bool,
) -> tuple[list[tuple[torch.device, Formats, array, list[int]]], list[int]]:
    """Rows of every parameter that is a plain contiguous tensor with a gradient and states to match.

    Returns the calls to make, each (device, formats, rows, indices into `params`), and the indices of
    parameters with a gradient that need a closer look: DTensors, other layouts, whatever is wrong.
    Nothing is remembered between calls, so no change of a tensor can be missed. A parameter without
    gradient is passed over, one that is listed twice is taken once.
    """
    if _EXCHANGE is None:
        with_grad = {id(p): i for i, p in enumerate(params) if getattr(p, grad_name, None) is not None}
        return [], sorted(with_grad.values())
    found, left = _cpu.gather(
        _EXCHANGE,
        params,
        grad_name,
        states,
        _PLAIN_TYPES,
        exp_avg=_CODES[exp_avg],
        exp_avg_sq=_CODES[exp_avg_sq],
        master=NONE if master is None else _CODES[master],
        step_on_device=step_on_device,
    )
    calls = []
    for device_type, index, formats, packed, indices in found:
        device = torch.device("cpu") if device_type == _DLPACK_CPU else torch.device("cuda", index)
        rows = array("q")
        rows.frombytes(packed)
        calls.append((device, Formats(*formats), rows, indices))
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
) -> None:
    """Updates every row in place, once; on CUDA it is queued on the current stream.

    `rows` is an array('q') of ROW_WORDS a row. `grad_scale` divides the gradients. `advance` adds one
    to each row's step counter first; without it the counters are used as they stand, for callers that
    update one parameter in several calls. Step counters are in host memory, unless `scalars` is given:
    then they are on the device, each row's own, and the host reads nothing.
    """
    if not rows:
        return
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
    _module_for(device).advance_steps(counters, **_place(device), found_inf_address=_address(found_inf, device))


def decode(state: Tensor, out: Tensor) -> None:
    """Writes the FP32 values of a contiguous 1-D slice of a state into `out`, same device, same count."""
    _check_slice(state, out)
    code = format_of(state)
    if is_fake(state) or is_fake(out):
        return
    _convert(state.device, "decode", code, state.data_ptr(), out.data_ptr(), state.numel())


def encode(values: Tensor, state: Tensor) -> None:
    """Writes FP32 `values` into a contiguous 1-D slice of a state, rounding to its format."""
    _check_slice(state, values)
    code = format_of(state)
    if is_fake(state) or is_fake(values):
        return
    _convert(state.device, "encode", code, values.data_ptr(), state.data_ptr(), state.numel())


def refresh_master(param: Tensor, master: Tensor) -> None:
    """Where the FP32 master does not round to the BF16 parameter, the parameter's value replaces it.

    ValueError where their counts differ.
    """
    if master.numel() != param.numel():
        raise ValueError(f"master_param: found {master.numel()} elements; expected the parameter's {param.numel()}")
    if is_fake(param) or is_fake(master):
        return
    _convert(param.device, "refresh_master", param.data_ptr(), master.data_ptr(), param.numel())


def _convert(device: torch.device, what: str, *arguments: int) -> None:
    where = _place(device) if device.type == "cuda" else {"threads": num_threads()}
    getattr(_module_for(device), what)(*arguments, **where)


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
