"""Makes states for the kernels, runs one update on them, and compares what comes out bit by bit.

Nothing here knows Adam: what is right is said by adam_judge, contract_judge, storage_judge and payload_judge.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from statestream import _cpu, kernels
from statestream.kernels import AdamOptions
from statestream.kernels.abi import extras_row
from statestream.tensors.global_index import WHOLE, IndexMap
from torch import Tensor

from native import payload_judge, storage_judge

CPU = torch.device("cpu")
ISAS = tuple(_cpu.isas())
CHUNK = 64 * 1024
"""Elements that one thread takes at a time; sizes beside its multiples are worth a test."""

F32, BF16, F16, I16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8
_SHORT = {F32: "f32", BF16: "bf16", F16: "f16", I16: "i16", U8: "f8", None: ""}
PAYLOADS = {F16: payload_judge.FP16, U8: payload_judge.FP8}
"""Of the dtypes in which moments and masters are stored with scales."""

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
    """What one call reads and writes; master is None, float32, float16, or int16 for remainders."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    master: torch.dtype | None = None

    @property
    def formats(self) -> kernels.Formats:
        numbers = {F32: kernels.FLOAT32, BF16: kernels.BFLOAT16, F16: kernels.FLOAT16}
        states = {**numbers, F16: kernels.SCALED_FLOAT16, U8: kernels.SCALED_FLOAT8}
        masters = {**states, I16: kernels.REMAINDER, None: kernels.NONE}
        return kernels.Formats(
            numbers[self.param],
            numbers[self.grad],
            states[self.exp_avg],
            states[self.exp_avg_sq],
            masters[self.master],
        )

    @property
    def scaled(self) -> list[str]:
        """Names of the tensors that have scales."""
        return [name for name in ("exp_avg", "exp_avg_sq", "master") if getattr(self, name) in PAYLOADS]

    def __str__(self) -> str:
        weight = _SHORT[self.param] + _SHORT[self.master]
        return "-".join([weight, *(_SHORT[t] for t in (self.grad, self.exp_avg, self.exp_avg_sq))])


ALL_DTYPES = [
    Dtypes(param, grad, exp_avg, exp_avg_sq, master)
    for (param, master), grad, exp_avg, exp_avg_sq in itertools.product(
        [(F32, None), (BF16, None), (BF16, F32), (BF16, I16)], [F32, BF16], [F32, BF16], [F32, BF16]
    )
]
"""Those that have a kernel of their own."""
GENERIC_DTYPES = [
    dtypes
    for (param, master), grad, exp_avg, exp_avg_sq in itertools.product(
        [(F32, None), (BF16, None), (BF16, F32), (BF16, F16), (BF16, I16), (F16, None), (F16, F32), (F16, F16)],
        [F32, BF16, F16],
        [F32, BF16, F16, U8],
        [F32, BF16, F16, U8],
    )
    if (dtypes := Dtypes(param, grad, exp_avg, exp_avg_sq, master)) not in ALL_DTYPES
]
"""Those that the generic kernel serves."""
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
    scales: dict[str, Tensor] = field(default_factory=dict)
    """Of the whole tensor, by the name of what they scale."""
    first: int = 0
    """Where in its tensor these elements begin."""
    ordinal: int = 0
    index_map: IndexMap = WHOLE

    @classmethod
    def of(cls, values: Values, dtypes: Dtypes, step: int = 0) -> State:
        """`values` rounded to the formats; `step` updates are counted as done."""
        param, master = values.weight.to(dtypes.param), None
        if dtypes.master is F32:
            master = values.weight
        elif dtypes.master is I16:
            high, low = storage_judge.split(values.weight.numpy().view(np.uint32))
            param, master = as_bfloat16(high), torch.from_numpy(low.view(np.int16))
        stored = {"exp_avg": values.exp_avg, "exp_avg_sq": values.exp_avg_sq, "master": master}
        if dtypes.master is F16:
            stored["master"] = values.weight
        scales = {}
        for name, tensor in stored.items():
            dtype = getattr(dtypes, name)
            if dtype in PAYLOADS:
                root = name == "exp_avg_sq"
                payloads, scale = payload_judge.stored_tensor(PAYLOADS[dtype], tensor.numpy(), root=root)
                stored[name], scales[name] = as_payloads(payloads, dtype), torch.from_numpy(scale)
            elif tensor is not None:
                stored[name] = tensor.to(dtype, copy=True)
        grad = values.grad.to(dtypes.grad, copy=True)
        return cls(param.clone(), grad, **stored, step=torch.tensor(float(step)), scales=scales)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The elementwise tensors by name; no master where there is none."""
        for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def replaced(self, change) -> State:
        """A state whose elementwise tensors are change(tensor); the step counter is shared."""
        changed = {name: change(tensor) for name, tensor in self.tensors()}
        return replace(self, **{"master": None, **changed})

    def clone(self) -> State:
        copy = self.replaced(Tensor.clone)
        copy.step = self.step.clone()
        copy.scales = {name: scale.clone() for name, scale in self.scales.items()}
        return copy

    def __getitem__(self, elements: slice) -> State:
        """A view of some elements, with the same step counter and scales."""
        first, _, step = elements.indices(self.param.numel())
        assert step == 1
        return replace(self.replaced(lambda tensor: tensor[elements]), first=self.first + first)

    def extras(self) -> tuple[int, ...]:
        scales = {f"{name}_scale": scale for name, scale in self.scales.items()}
        return extras_row(
            self.param.numel(), ordinal=self.ordinal, first=self.first, index_map=self.index_map, **scales
        )

    def values(self, name: str) -> np.ndarray:
        """FP32 numbers that a tensor of the state holds, by payload_judge where it is scaled."""
        tensor = getattr(self, name)
        if name not in self.scales:
            return tensor.float().numpy()
        root = name == "exp_avg_sq"
        scale = self.scales[name].numpy()
        return payload_judge.loaded_tensor(PAYLOADS[tensor.dtype], bits(tensor), scale, root=root)

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
    seed: int = 0,
    stochastic: int = 0,
) -> None:
    """One call of the kernel in use, in place, with a row a state."""
    rows, extras = array("q"), array("q")
    for s in [states] if isinstance(states, State) else states:
        rows.extend(kernels.row(s.param, s.grad, s.exp_avg, s.exp_avg_sq, s.master, s.step))
        extras.extend(s.extras())
    kernels.adam(
        CPU,
        rows,
        dtypes.formats,
        options,
        grad_scale=grad_scale,
        threads=threads,
        advance=advance,
        extras=extras if dtypes.scaled or stochastic else None,
        seed=seed,
        stochastic=stochastic,
    )


def updated(state: State, dtypes: Dtypes, options: AdamOptions = ADAMW, **how) -> State:
    """`update` on a copy."""
    copy = state.clone()
    update(copy, dtypes, options, **how)
    return copy


@contextmanager
def use_isa(name: str):
    before = _cpu.isa()
    _cpu.use_isa(name)
    try:
        yield
    finally:
        _cpu.use_isa(before)


def bits(tensor: Tensor) -> np.ndarray:
    """The bit patterns of a tensor's elements, as uint8, uint16 or uint32."""
    as_integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return as_integers.numpy().view({1: np.uint8, 2: np.uint16, 4: np.uint32}[tensor.element_size()])


def as_payloads(patterns: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor of these FP16 or FP8 payloads."""
    if dtype is U8:
        return torch.from_numpy(patterns.astype(np.uint8))
    return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(F16)


def as_bfloat16(patterns: np.ndarray) -> Tensor:
    """A bfloat16 tensor of these bit patterns (uint16)."""
    return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(BF16)


def as_float32(patterns: np.ndarray) -> Tensor:
    """A float32 tensor of these bit patterns (uint32)."""
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32).copy())


def difference(got: State, want: State) -> str | None:
    """Where two states first differ by a bit, in words; None where they do not."""
    scales = [(f"{name} scale", scale) for name, scale in got.scales.items()]
    wanted_scales = [(f"{name} scale", scale) for name, scale in want.scales.items()]
    pairs = zip([*got.tensors(), *scales], [*want.tensors(), *wanted_scales], strict=True)
    for (name, a), (_, b) in pairs:
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
