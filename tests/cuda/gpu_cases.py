"""Parameters with their state on any device, for one call of the kernels, and the comparison of their bits."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

import torch
from statestream import kernels
from statestream.kernels import AdamOptions, DeviceScalars, Formats
from torch import Tensor

__all__ = ["ALL_BF16", "ALL_FORMATS", "CPU", "GPU", "OPTIONS", "Tensors", "assert_same_bits", "name_of", "step"]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
F32, BF16, I16 = torch.float32, torch.bfloat16, torch.int16

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
"""Dtypes of param, grad, exp_avg, exp_avg_sq and master: every combination that has a kernel."""
ALL_BF16: Dtypes = (BF16, BF16, BF16, BF16, None)


def name_of(dtypes: Dtypes) -> str:
    return "-".join({F32: "f32", BF16: "bf16", I16: "remainders", None: "none"}[d] for d in dtypes)


@dataclass
class Tensors:
    """Any number of parameters: by role, a list of flat tensors; no masters where there are none."""

    dtypes: Dtypes
    roles: list[list[Tensor]]
    steps: list[Tensor]

    @classmethod
    def random(
        cls, dtypes: Dtypes, lengths: list[int], seed: int, *, any_bits: bool = False, shift: int = 0
    ) -> Tensors:
        """On the CPU. `any_bits`: every bit pattern, NaN and infinities among them, and many zeros; else
        ordinary magnitudes. Tensor i of a role starts `shift * i % 17` elements into its memory."""
        random = torch.Generator().manual_seed(seed)
        roles = []
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
                tensors.append(_shifted(values.to(dtype), shift * i % 17))
            roles.append(tensors)
        return cls(dtypes, roles, [torch.tensor(float(i % 5)) for i in range(len(lengths))])

    def to(self, device: torch.device, *, steps_on_device: bool = False) -> Tensors:
        """A copy with each tensor as far into its memory as here."""
        roles = [[_shifted(t, t.storage_offset(), device) for t in tensors] for tensors in self.roles]
        return Tensors(self.dtypes, roles, [s.to(device if steps_on_device else CPU, copy=True) for s in self.steps])

    def rows(self) -> array:
        rows = array("q")
        for i, step_counter in enumerate(self.steps):
            param, grad, exp_avg, exp_avg_sq, *master = (tensors[i] for tensors in self.roles)
            rows.extend(kernels.row(param, grad, exp_avg, exp_avg_sq, master[0] if master else None, step_counter))
        return rows

    @property
    def formats(self) -> Formats:
        return Formats(
            *(kernels.NONE if d is None else kernels.format_of(torch.empty(0, dtype=d)) for d in self.dtypes)
        )


def _shifted(values: Tensor, offset: int, device: torch.device = CPU) -> Tensor:
    memory = torch.empty(offset + values.numel(), dtype=values.dtype, device=device)
    return memory[offset:].copy_(values)


def step(
    tensors: Tensors, options: AdamOptions = OPTIONS, *, scalars: DeviceScalars | None = None, **how: object
) -> None:
    """One call of the kernels of the device that the tensors are on."""
    kernels.adam(tensors.roles[0][0].device, tensors.rows(), tensors.formats, options, scalars=scalars, **how)


def assert_same_bits(got: Tensors, want: Tensors) -> None:
    for role, (ours, theirs) in enumerate(zip(got.roles, want.roles, strict=True)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
            a, b = a.cpu().view(integers), b.cpu().view(integers)
            if not torch.equal(a, b):
                at = int((a != b).nonzero()[0])
                raise AssertionError(
                    f"role {role} of tensor {i}: {int((a != b).sum())} of {a.numel()} differ, first at {at}: "
                    f"{a[at].item() & 0xFFFFFFFF:#x} is not {b[at].item() & 0xFFFFFFFF:#x}"
                )
    assert [s.item() for s in got.steps] == [s.item() for s in want.steps]
