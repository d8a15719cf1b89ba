"""Parameters with their state on any device, for one call of the kernels, and the comparison of their bits."""

from __future__ import annotations

import itertools
import os
from array import array
from dataclasses import dataclass, field

import torch
from statestream import kernels
from statestream.formats import scale_count
from statestream.kernels import AdamOptions, DeviceScalars, Formats
from statestream.kernels.abi import extras_row
from statestream.tensors.global_index import WHOLE, IndexMap
from torch import Tensor

__all__ = [
    "ALL_BF16",
    "ALL_FORMATS",
    "BULK",
    "CPU",
    "GENERIC_FORMATS",
    "GPU",
    "OPTIONS",
    "SCALED_BF16",
    "Tensors",
    "assert_equal_bits",
    "assert_same_bits",
    "flags_of",
    "name_of",
    "step",
]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BULK = 16 if "STATESTREAM_FAKE_CUDA" in os.environ else 1
"""By what large sizes are divided: on the runtime of tests/fake_runtime a kernel takes a thousand times as long."""
F32, BF16, I16, F16, U8 = torch.float32, torch.bfloat16, torch.int16, torch.float16, torch.uint8

OPTIONS = AdamOptions(
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, bias_correction=True, maximize=False
)

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype | None]
ALL_FORMATS: list[Dtypes] = [
    (param, grad, exp_avg, exp_avg_sq, master)
    for (param, master), grad, exp_avg, exp_avg_sq in itertools.product(
        [(F32, None), (BF16, None), (BF16, F32), (BF16, I16)], [F32, BF16], [F32, BF16], [F32, BF16]
    )
]
"""Dtypes of param, grad, exp_avg, exp_avg_sq and master: every combination that has a kernel of its own."""
ALL_BF16: Dtypes = (BF16, BF16, BF16, BF16, None)
SCALED_BF16: Dtypes = (BF16, BF16, U8, U8, F16)
GENERIC_FORMATS: list[Dtypes] = [
    dtypes
    for (param, master), grad, exp_avg, exp_avg_sq in itertools.product(
        [(F32, None), (BF16, None), (BF16, F32), (BF16, F16), (BF16, I16), (F16, None), (F16, F32), (F16, F16)],
        [F32, BF16, F16],
        [F32, BF16, F16, U8],
        [F32, BF16, F16, U8],
    )
    if (dtypes := (param, grad, exp_avg, exp_avg_sq, master)) not in ALL_FORMATS
]
"""The combinations that the generic kernel serves; float16 and uint8 (E4M3) moments and masters have scales."""

MAPS = [
    (WHOLE, 0),
    (IndexMap(offset=2**35 + 3), 256),
    (IndexMap(size1=13, stride0=64, stride2=1, offset=5), 512),
    (IndexMap(size0=24, stride0=100, stride1=1), 256),
    (IndexMap(size0=3, size1=8, stride0=4096, stride1=40, stride2=1), 256),
    (IndexMap(size1=4, stride0=1, stride2=64), 0),
]
"""Where a tensor's elements are in the whole one, and the number of the first; tensor i has map i % 6."""


def name_of(dtypes: Dtypes) -> str:
    names = {F32: "f32", BF16: "bf16", I16: "remainders", F16: "f16", U8: "f8", None: "none"}
    return "-".join(names[d] for d in dtypes)


def is_scaled(dtypes: Dtypes, role: int) -> bool:
    return role >= 2 and dtypes[role] in (F16, U8)


def flags_of(dtypes: Dtypes) -> int:
    """Every flag of `stochastic` that the formats take."""
    param, _, exp_avg, exp_avg_sq, master = dtypes
    rounded = (BF16, F16, U8)
    return (exp_avg in rounded) | (exp_avg_sq in rounded) << 1 | (param is BF16 and master is None) << 2


@dataclass
class Tensors:
    """Any number of parameters: by role, a list of flat tensors; no masters where there are none. Scales too are by
    role, of the roles that have them."""

    dtypes: Dtypes
    roles: list[list[Tensor]]
    steps: list[Tensor]
    scales: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def random(
        cls, dtypes: Dtypes, lengths: list[int], seed: int, *, any_bits: bool = False, shift: int = 0
    ) -> Tensors:
        """On the CPU. `any_bits`: every bit pattern, NaN and infinities among them, and many zeros; else
        ordinary magnitudes. Tensor i of a role starts `shift * i % 17` elements into its memory."""
        random = torch.Generator().manual_seed(seed)
        roles, scales = [], {}
        for role, dtype in enumerate(dtypes):
            if dtype is None:
                continue
            tensors = []
            for i, n in enumerate(lengths):
                values = torch.randn(n, generator=random)
                if role == 3:
                    values = values.square() * 1e-2
                if any_bits:
                    patterns = torch.randint(-(1 << 31), 1 << 31, (n,), generator=random).int()
                    values = torch.where(torch.rand(n, generator=random) < 0.2, 0.0, patterns.view(F32))
                if dtype is I16:
                    values = torch.randint(-(1 << 15), 1 << 15, (n,), generator=random)
                if dtype is U8 or (dtype is F16 and any_bits):  # any payload, NaN and infinities among them
                    values = torch.randint(0, 1 << 16, (n,), generator=random).short()
                    values = values.to(U8) if dtype is U8 else values.view(F16)
                tensors.append(_shifted(values.to(dtype), shift * i % 17))
            roles.append(tensors)
            if is_scaled(dtypes, role):
                scales[role] = [
                    2.0 ** torch.randint(-20, 4, (scale_count(n + MAPS[i % 6][1]),), generator=random)
                    for i, n in enumerate(lengths)
                ]
        return cls(dtypes, roles, [torch.tensor(float(i % 5)) for i in range(len(lengths))], scales)

    def to(self, device: torch.device, *, steps_on_device: bool = False) -> Tensors:
        """A copy with each tensor as far into its memory as here."""
        roles = [[_shifted(t, t.storage_offset(), device) for t in tensors] for tensors in self.roles]
        scales = {role: [s.to(device, copy=True) for s in some] for role, some in self.scales.items()}
        steps = [s.to(device if steps_on_device else CPU, copy=True) for s in self.steps]
        return Tensors(self.dtypes, roles, steps, scales)

    def rows(self) -> array:
        rows = array("q")
        for i, step_counter in enumerate(self.steps):
            param, grad, exp_avg, exp_avg_sq, *master = (tensors[i] for tensors in self.roles)
            rows.extend(kernels.row(param, grad, exp_avg, exp_avg_sq, master[0] if master else None, step_counter))
        return rows

    def extras(self) -> array:
        extras = array("q")
        names = {2: "exp_avg_scale", 3: "exp_avg_sq_scale", 4: "master_scale"}
        for i, param in enumerate(self.roles[0]):
            index_map, first = MAPS[i % 6]
            scales = {names[role]: some[i] for role, some in self.scales.items()}
            extras.extend(extras_row(param.numel(), ordinal=i, first=first, index_map=index_map, **scales))
        return extras

    @property
    def formats(self) -> Formats:
        codes = []
        for role, dtype in enumerate(self.dtypes):
            of = kernels.format_of if role < 2 else kernels.state_format_of
            codes.append(kernels.NONE if dtype is None else of(torch.empty(0, dtype=dtype)))
        return Formats(*codes)


def _shifted(values: Tensor, offset: int, device: torch.device = CPU) -> Tensor:
    memory = torch.empty(offset + values.numel(), dtype=values.dtype, device=device)
    return memory[offset:].copy_(values)


def step(
    tensors: Tensors,
    options: AdamOptions = OPTIONS,
    *,
    scalars: DeviceScalars | None = None,
    stochastic: int = 0,
    **how: object,
) -> None:
    """One call of the kernels of the device that the tensors are on."""
    if tensors.scales or stochastic:
        how |= {"extras": tensors.extras(), "stochastic": stochastic, "seed": 0x9E3779B97F4A7C15}
    kernels.adam(tensors.roles[0][0].device, tensors.rows(), tensors.formats, options, scalars=scalars, **how)


def assert_same_bits(got: Tensors, want: Tensors) -> None:
    named = {f"role {role}": pair for role, pair in enumerate(zip(got.roles, want.roles, strict=True))}
    assert got.scales.keys() == want.scales.keys()
    named |= {f"scale of role {role}": (some, want.scales[role]) for role, some in got.scales.items()}
    for name, (ours, theirs) in named.items():
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal_bits(a, b, f"{name} of tensor {i}")
    assert [s.item() for s in got.steps] == [s.item() for s in want.steps]


def assert_equal_bits(a: Tensor, b: Tensor, name: str = "") -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = a.cpu().view(integers), b.cpu().view(integers)
    if not torch.equal(a, b):
        at = int((a != b).nonzero()[0])
        raise AssertionError(
            f"{name}: {int((a != b).sum())} of {a.numel()} differ, first at {at}: "
            f"{a[at].item() & 0xFFFFFFFF:#x} is not {b[at].item() & 0xFFFFFFFF:#x}"
        )
