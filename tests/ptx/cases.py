"""States for the kernels, and the same call on the CPU kernel and on interpreted PTX.

The CPU kernel is the reference here: tests/native holds that against references of its own.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from statestream import _cpu
from statestream.formats import FORMATS, Role
from statestream.kernels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NONE,
    REMAINDER,
    SCALED_FLOAT8,
    SCALED_FLOAT16,
    AdamOptions,
    Formats,
)
from statestream.tensors.global_index import WHOLE, IndexMap

from .build import ARCHS
from .device import Device, Launch

__all__ = [
    "ADAMW",
    "ALL_FORMATS",
    "FIRST_ADDRESS",
    "GENERIC",
    "HOT",
    "SCALED",
    "WIDTHS",
    "Tensors",
    "assert_same",
    "check",
    "chunk_elements",
    "generic_formats",
    "launches_of",
    "on_cpu",
    "on_device",
    "rows_of",
    "tensors",
    "unit",
]

ADAMW = AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, bias_correction=True, maximize=False)

ALL_FORMATS = [
    Formats(param, grad, exp_avg, exp_avg_sq, master)
    for (param, master), grad, exp_avg, exp_avg_sq in itertools.product(
        [(FLOAT32, NONE), (BFLOAT16, NONE), (BFLOAT16, FLOAT32), (BFLOAT16, REMAINDER)],
        *[[FLOAT32, BFLOAT16]] * 3,
    )
]

HOT = [
    Formats(FLOAT32, FLOAT32, FLOAT32, FLOAT32, NONE),
    Formats(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, NONE),
    Formats(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32),
    Formats(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, REMAINDER),
    Formats(FLOAT32, BFLOAT16, BFLOAT16, FLOAT32, NONE),
]
"""A sample: each kind of weight, both formats in each other place."""

GENERIC = [
    Formats(BFLOAT16, BFLOAT16, SCALED_FLOAT8, SCALED_FLOAT8, NONE),
    Formats(BFLOAT16, BFLOAT16, SCALED_FLOAT16, SCALED_FLOAT16, SCALED_FLOAT16),
    Formats(FLOAT16, FLOAT16, SCALED_FLOAT8, SCALED_FLOAT16, FLOAT32),
    Formats(FLOAT32, FLOAT16, FLOAT32, SCALED_FLOAT8, NONE),
    Formats(BFLOAT16, FLOAT32, SCALED_FLOAT8, BFLOAT16, REMAINDER),
    Formats(FLOAT16, FLOAT32, BFLOAT16, FLOAT32, SCALED_FLOAT16),
]
"""A sample of the generic kernel's: every format in every place that takes it."""

FIRST_ADDRESS = 1 << 45
"""Of tensors that are not there."""

WIDTHS = {f.code: f.itemsize for f in FORMATS}
SCALED = [f.code for f in FORMATS if f.scaled]
_MOMENTS = [f.code for f in FORMATS if Role.MOMENT in f.roles]
_NAMES = {NONE: ""} | {f.code: f"scaled_{f.name}" if f.scaled else f.name for f in FORMATS}
_DTYPES = {code: np.dtype(f"u{width}") for code, width in WIDTHS.items()}
_SPECIALS = [0x0, 0x80000000, 0x1, 0x80000001, 0x7FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
_SPECIALS += [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x3F808000, 0x3F818000, 0x7F7F8000]


def unit(formats: Formats) -> str:
    """A short name of a combination."""
    weight = _NAMES[formats.param] + ("+" + _NAMES[formats.master] if formats.master else "")
    return "-".join([weight, *(_NAMES[f] for f in formats[1:4])])


@dataclass
class Tensors:
    """One parameter's arrays, as the bits that are stored; a step counter (float32) of its own. Scales are
    float32, by the name of what they scale."""

    param: np.ndarray
    grad: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    master: np.ndarray | None
    step: np.ndarray
    exp_avg_scale: np.ndarray | None = None
    exp_avg_sq_scale: np.ndarray | None = None
    master_scale: np.ndarray | None = None
    ordinal: int = 0
    first: int = 0
    """Of its local tensor's elements, the number of the first one here."""
    index_map: IndexMap = WHOLE

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master", "step", *_SCALE_NAMES):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def copy(self) -> Tensors:
        """The same values with every array at the same place modulo 64 bytes."""
        placed = {
            name: _at(array, array.ctypes.data % 64 // array.itemsize) if name != "step" else array.copy()
            for name, array in self.arrays()
        }
        return replace(self, **placed)

    def row(self) -> list[int]:
        master = 0 if self.master is None else self.master.ctypes.data
        addresses = [a.ctypes.data for a in (self.param, self.grad, self.exp_avg, self.exp_avg_sq)]
        return [self.param.size, *addresses, master, self.step.ctypes.data, 0]

    def extras(self) -> list[int]:
        scales = (getattr(self, name) for name in _SCALE_NAMES)
        return [*(0 if s is None else s.ctypes.data for s in scales), self.ordinal, self.first, *self.index_map, 0]


def _at(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins `offset` elements after a multiple of 64 bytes."""
    raw = np.zeros(values.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset * values.itemsize
    placed = raw[start : start + values.nbytes].view(values.dtype)
    placed[:] = values
    return placed


_SCALE_NAMES = ("exp_avg_scale", "exp_avg_sq_scale", "master_scale")


def _bits(values: np.ndarray, format_code: int, rng: np.random.Generator) -> np.ndarray:
    """FP32 values cut to a format; which rounding does not matter for an input. FP8 is any pattern instead."""
    bits = values.astype(np.float32).view(np.uint32)
    if format_code == FLOAT32:
        return bits
    if WIDTHS[format_code] == 1:
        return np.where(values == 0, 0, rng.integers(0, 256, values.size)).astype(np.uint8)
    if format_code in (FLOAT16, SCALED_FLOAT16):
        with np.errstate(all="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return (bits >> 16).astype(np.uint16)


def tensors(
    formats: Formats, n: int, seed: int, *, offsets: tuple[int, ...] = (0,), step: float = 0.0, specials: float = 0.0
) -> Tensors:
    """Random values, a share of them `specials`: zeros, denormals, infinities, NaNs, halves of BF16. Scales are
    powers of two.

    `offsets` are elements past a multiple of 64 bytes, of param, grad, exp_avg, exp_avg_sq and master
    in turn, the last one for all the rest.
    """
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-4, 0, (5, n))
    values = (rng.standard_normal((5, n)) * scale).astype(np.float32)
    values[3] **= 2
    values[3][rng.random(n) < 0.2] = 0
    values[1:3, rng.random(n) < 0.2] *= np.float32(0)  # with the line above, rows that were never touched
    values = values.view(np.uint32)
    at = rng.random((5, n)) < specials
    values[at] = rng.choice(np.array(_SPECIALS, np.uint32), at.sum())
    values[3] &= 0x7FFFFFFF
    stored = []
    for k, format_code in enumerate(formats):
        if format_code == NONE:
            stored.append(None)
            continue
        if format_code == REMAINDER:
            bits = values[k].astype(np.uint16)
        else:
            bits = _bits(values[k].view(np.float32), format_code, rng)
        stored.append(_at(bits, offsets[min(k, len(offsets) - 1)]))
        assert stored[k].dtype == _DTYPES[format_code]
    scales = {
        name: (2.0 ** rng.integers(-20, 3, -(-n // 256))).astype(np.float32)
        for name, format_code in zip(_SCALE_NAMES, (formats.exp_avg, formats.exp_avg_sq, formats.master), strict=True)
        if format_code in SCALED
    }
    return Tensors(*stored, step=np.array([step], np.float32), **scales)


def rows_of(group: list[Tensors]) -> array:
    return array("q", itertools.chain.from_iterable(t.row() for t in group))


def extras_of(group: list[Tensors]) -> array:
    return array("q", itertools.chain.from_iterable(t.extras() for t in group))


def _more(group: list[Tensors], formats: Formats, stochastic: int, seed: int) -> dict:
    """What a call needs beside rows."""
    if not stochastic and not any(f in SCALED for f in formats):
        return {}
    return {"extras": extras_of(group), "seed": seed, "stochastic": stochastic}


def on_cpu(group: list[Tensors], formats: Formats, options: AdamOptions = ADAMW, **call) -> None:
    """One update in place by the CPU kernel."""
    _cpu.adam(rows_of(group), tuple(formats), **_call(group, formats, options, **call), threads=1)


def on_device(group: list[Tensors], formats: Formats, device: Device, options: AdamOptions = ADAMW, **call) -> None:
    """The same by the device's kernels. The counters are host memory unless the call is capturable;
    then they must have been added to the device."""
    for k, one in enumerate(group):
        for name, values in one.arrays():
            if name != "step":
                device.add(values, f"{name} of tensor {k}", writable=name != "grad")
    with device.module() as module:
        module.adam(rows_of(group), tuple(formats), **_call(group, formats, options, **call), device=0, stream=0)


def _call(
    group: list[Tensors],
    formats: Formats,
    options: AdamOptions,
    grad_scale: float = 1.0,
    advance: bool = True,
    stochastic: int = 0,
    seed: int = 0x123456789ABCDEF0,
    **more,
) -> dict:
    more |= _more(group, formats, stochastic, seed)
    return {**vars(options), "grad_scale": grad_scale, "advance": advance, **more}


def assert_same(got: list[Tensors], want: list[Tensors], what: str = "") -> None:
    for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for (name, a), (_, b) in zip(ours.arrays(), theirs.arrays(), strict=True):
            if a.tobytes() != b.tobytes():
                bad = np.flatnonzero(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
                first = int(bad[0])
                raise AssertionError(
                    f"{what} {name} of tensor {k}, {ours.param.size} elements: {bad.size} differ, the first at "
                    f"{first}: {int(a.view(f'u{a.itemsize}')[first]):#x} is not "
                    f"{int(b.view(f'u{b.itemsize}')[first]):#x}"
                )


def check(group: list[Tensors], formats: Formats, device: Device, **call) -> None:
    """One update of a group on the CPU and on the device."""
    want = [one.copy() for one in group]
    on_cpu(want, formats, **call)
    on_device(group, formats, device, **call)
    assert_same(group, want)


@cache
def chunk_elements(formats: Formats = HOT[0]) -> int:
    """Elements of a block's piece of a tensor: what a launch with a block for each of them shows."""
    n, step = 2**34, np.zeros(1, np.float32)
    row = array("q", [n, *(FIRST_ADDRESS * k for k in range(1, 5)), 0, step.ctypes.data, 0])
    more = {}
    if any(code in SCALED for code in formats):
        more["extras"] = array("q", [*(FIRST_ADDRESS * k for k in range(5, 8)), 0, 0, *WHOLE, 0])
    return n // launches_of(row, formats, multiprocessors=2**30, **more)[0].grid


def generic_formats() -> list[Formats]:
    """Every combination that the generic kernel serves."""
    weights = [(FLOAT32, NONE), *itertools.product([BFLOAT16, FLOAT16], [NONE, FLOAT32, SCALED_FLOAT16])]
    every = itertools.product([*weights, (BFLOAT16, REMAINDER)], [FLOAT32, BFLOAT16, FLOAT16], _MOMENTS, _MOMENTS)
    return [f for (param, master), *rest in every if (f := Formats(param, *rest, master)) not in ALL_FORMATS]


def launches_of(rows: array, formats: Formats, *, multiprocessors: int = 2, **call) -> list[Launch]:
    """What a call with these rows would launch; nothing runs."""
    device = Device(ARCHS[0], multiprocessors=multiprocessors, interpret=False)
    with device.module() as module:
        options = {**vars(ADAMW), "grad_scale": 1.0, "advance": False, **call}
        module.adam(rows, tuple(formats), **options, device=0, stream=0)
    return device.launches
