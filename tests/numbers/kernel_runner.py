"""Makes states for the kernels, runs one update on them, and compares what comes out bit by bit.

Nothing here knows Adam: what is right is said by adam_judge, contract_judge and storage_judge.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import storage_judge
import torch
from statestream import _cpu, kernels
from statestream.kernels import AdamOptions
from torch import Tensor

CPU = torch.device("cpu")
FORMS = tuple(_cpu.forms())
CHUNK = 64 * 1024
"""Elements that one thread takes at a time; sizes beside its multiples are worth a test."""

F32, BF16, I16 = torch.float32, torch.bfloat16, torch.int16
_SHORT = {F32: "f32", BF16: "bf16", I16: "i16", None: ""}

ADAMW = AdamOptions(
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    decoupled=True,
    bias_correction=True,
    maximize=False,
)
"""torch.optim.AdamW's defaults."""


@dataclass(frozen=True)
class Dtypes:
    """What one call reads and writes; master is None, float32, or int16 for remainders."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    master: torch.dtype | None = None

    @property
    def formats(self) -> kernels.Formats:
        codes = {F32: kernels.FLOAT32, BF16: kernels.BFLOAT16, I16: kernels.REMAINDER, None: kernels.NONE}
        return kernels.Formats(*(codes[t] for t in (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.master)))

    def __str__(self) -> str:
        weight = _SHORT[self.param] + _SHORT[self.master]
        return "-".join([weight, *(_SHORT[t] for t in (self.grad, self.exp_avg, self.exp_avg_sq))])


ALL_DTYPES = [
    Dtypes(param, grad, exp_avg, exp_avg_sq, master)
    for (param, master), grad, exp_avg, exp_avg_sq in itertools.product(
        [(F32, None), (BF16, None), (BF16, F32), (BF16, I16)], [F32, BF16], [F32, BF16], [F32, BF16]
    )
]
ALL_F32 = Dtypes(F32, F32, F32, F32)
ALL_BF16 = Dtypes(BF16, BF16, BF16, BF16)


@dataclass
class Values:
    """The FP32 numbers that a state holds, before they are stored in any format."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def random_values(n: int, seed: int, specials: float = 0.0) -> Values:
    """Magnitudes over seven decades. A share of `specials` of each tensor is zeros, denormals, infinities,
    NaNs and the largest numbers."""
    rng = np.random.default_rng(seed)

    def wide(low: float, high: float) -> np.ndarray:
        return (rng.standard_normal(n) * 10.0 ** rng.uniform(low, high, n)).astype(np.float32)

    arrays = [wide(-3, 1), wide(-6, 1), wide(-6, 1), (wide(-6, 1).astype(np.float64) ** 2).astype(np.float32)]
    extremes = np.array(
        [0.0, -0.0, 1e-45, -1e-40, 1.1e-38, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-20, 1e19], np.float32
    )
    if specials:
        for index, values in enumerate(arrays):
            at = rng.random(n) < specials
            chosen = rng.choice(extremes, n)
            values[at] = np.abs(chosen[at]) if index == 3 else chosen[at]
    return Values(*map(torch.from_numpy, arrays))


@dataclass
class State:
    """One parameter: the tensors that a kernel is given the addresses of."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Tensor

    @classmethod
    def of(cls, values: Values, dtypes: Dtypes, step: int = 0) -> State:
        """`values` rounded to the formats; `step` updates are counted as done."""
        param, master = values.weight.to(dtypes.param), None
        if dtypes.master is F32:
            master = values.weight
        elif dtypes.master is I16:
            high, low = storage_judge.split(values.weight.numpy().view(np.uint32))
            param, master = as_bfloat16(high), torch.from_numpy(low.view(np.int16))
        return cls(
            param.clone(),
            values.grad.to(dtypes.grad, copy=True),
            values.exp_avg.to(dtypes.exp_avg, copy=True),
            values.exp_avg_sq.to(dtypes.exp_avg_sq, copy=True),
            None if master is None else master.clone(),
            torch.tensor(float(step)),
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The elementwise tensors by name; no master where there is none."""
        for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def replaced(self, change) -> State:
        """A state whose elementwise tensors are change(tensor); the step counter is shared."""
        changed = {name: change(tensor) for name, tensor in self.tensors()}
        return State(**{"master": None, **changed}, step=self.step)

    def clone(self) -> State:
        copy = self.replaced(Tensor.clone)
        copy.step = self.step.clone()
        return copy

    def __getitem__(self, elements: slice) -> State:
        """A view of some elements, with the same step counter."""
        return self.replaced(lambda tensor: tensor[elements])

    def joined_master(self) -> np.ndarray:
        """Bits (uint32) of the FP32 master that the BF16 parameter and its remainders hold."""
        return storage_judge.join(bits(self.param), bits(self.master))


def update(
    states: State | Iterable[State],
    dtypes: Dtypes,
    options: AdamOptions = ADAMW,
    *,
    grad_scale: float = 1.0,
    threads: int = 1,
    advance: bool = True,
) -> None:
    """One call of the kernel in use, in place, with a row a state."""
    rows = array("q")
    for s in [states] if isinstance(states, State) else states:
        rows.extend(kernels.row(s.param, s.grad, s.exp_avg, s.exp_avg_sq, s.master, s.step))
    kernels.adam(CPU, rows, dtypes.formats, options, grad_scale=grad_scale, threads=threads, advance=advance)


def updated(state: State, dtypes: Dtypes, options: AdamOptions = ADAMW, **how) -> State:
    """`update` on a copy."""
    copy = state.clone()
    update(copy, dtypes, options, **how)
    return copy


@contextmanager
def use_form(name: str):
    before = _cpu.form()
    _cpu.use_form(name)
    try:
        yield
    finally:
        _cpu.use_form(before)


def bits(tensor: Tensor) -> np.ndarray:
    """The bit patterns of a tensor's elements, as uint16 or uint32."""
    as_integers = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return as_integers.numpy().view({2: np.uint16, 4: np.uint32}[tensor.element_size()])


def as_bfloat16(patterns: np.ndarray) -> Tensor:
    """A bfloat16 tensor of these bit patterns (uint16)."""
    return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(BF16)


def as_float32(patterns: np.ndarray) -> Tensor:
    """A float32 tensor of these bit patterns (uint32)."""
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32).copy())


def difference(got: State, want: State) -> str | None:
    """Where two states first differ by a bit, in words; None where they do not."""
    for (name, a), (_, b) in zip(got.tensors(), want.tensors(), strict=True):
        ours, theirs = bits(a), bits(b)
        if not np.array_equal(ours, theirs):
            wrong = np.flatnonzero(ours != theirs)
            i = int(wrong[0])
            return (
                f"{name}: {wrong.size} of {ours.size} differ, first at {i}: "
                f"{ours[i]:#x} ({a[i].item()}) is not {theirs[i]:#x} ({b[i].item()})"
            )
    if got.step.item() != want.step.item():
        return f"step: {got.step.item()} is not {want.step.item()}"
    return None


def assert_same_bits(got: State, want: State, what: object = "") -> None:
    found = difference(got, want)
    assert found is None, f"{what}: {found}"


MARGIN_BYTES = 128
"""More than the widest vector (64 bytes) on either side of a guarded tensor."""


class Guarded:
    """A copy of a state whose tensors start some elements past a 64-byte boundary, each with a canary
    before and after it."""

    def __init__(self, state: State, offsets: Iterable[int]):
        self._buffers: list[tuple[Tensor, int, int]] = []
        pending = iter(offsets)
        self.state = state.replaced(lambda tensor: self._place(tensor, next(pending)))
        self.state.step = state.step.clone()

    def _place(self, tensor: Tensor, offset: int) -> Tensor:
        margin = MARGIN_BYTES // tensor.element_size()
        begin, end = margin + offset, margin + offset + tensor.numel()
        buffer = torch.full(((end + margin) * tensor.element_size(),), 0x5A, dtype=torch.uint8)
        inside = buffer.view(tensor.dtype)[begin:end]
        inside.copy_(tensor)
        self._buffers.append((buffer, begin * tensor.element_size(), end * tensor.element_size()))
        return inside

    def intact(self) -> bool:
        """Whether no byte outside the tensors was written."""
        return all(
            bool((buffer[:begin] == 0x5A).all()) and bool((buffer[end:] == 0x5A).all())
            for buffer, begin, end in self._buffers
        )
