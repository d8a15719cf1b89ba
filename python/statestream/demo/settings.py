"""What the demo was asked for, checked before anything runs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from statestream import kernels
from statestream.arguments import as_dtype
from statestream.demo.controls import CONTROLS
from statestream.formats import Role

__all__ = ["RANKS", "Settings"]

RANKS = (1, 2, 4, 8)
"""Numbers of ranks that take equal parts of a batch."""


@dataclass(frozen=True)
class Settings:
    """One run of the demo. `control` plants a fault that the comparison has to find."""

    steps: int
    device: torch.device
    out: Path
    moments: torch.dtype
    seed: int
    control: str | None = None
    ranks: int = 1
    """Processes that train one model together."""
    remark: str | None = None
    """Why the device is another than one might expect."""

    @property
    def half(self) -> int:
        """The step after which the interrupted run is exported."""
        return self.steps // 2

    @classmethod
    def checked(
        cls,
        *,
        steps: int,
        device: str,
        out: Path,
        moments: str,
        seed: int,
        control: str | None = None,
        ranks: int = 1,
    ) -> Settings:
        """Raises ValueError, of one line that begins with the option, for what cannot be done."""
        if steps < 2:
            raise ValueError(f"--steps: {steps} is too few; it takes at least 2, to stop half way")
        if not 0 <= seed < 2**32:
            raise ValueError(f"--seed: {seed} is out of range; use 0 to {2**32 - 1}")
        if control is not None and control not in CONTROLS:
            raise ValueError(f"--plant: {control!r} is unknown; use {', '.join(CONTROLS)}")
        if ranks not in RANKS:
            raise ValueError(f"--ranks: {ranks} does not divide a batch; use {', '.join(map(str, RANKS))}")
        dtype = as_dtype("--moments", moments, Role.MOMENT)
        where, remark = _device(device, ranks)
        _prepare(out)
        return cls(steps, where, out, dtype, seed, control, ranks, remark)


def _device(name: str, ranks: int) -> tuple[torch.device, str | None]:
    if name == "cpu":
        return torch.device("cpu"), None
    if name == "auto":
        problem = _cuda_problem(torch.device("cuda"), ranks)
        if problem is None:
            return torch.device("cuda"), None
        return torch.device("cpu"), f"on the CPU, as {problem}" if torch.cuda.is_available() else None
    kind, colon, index = name.partition(":")
    if kind != "cuda" or (colon and not index.isascii()) or (colon and not index.isdigit()):
        raise ValueError(f"--device: {name!r} is not one of auto, cpu, cuda and cuda:N")
    if index and ranks > 1:
        raise ValueError(f"--device: {name} is one device, and each of {ranks} ranks takes one; use cuda or cpu")
    problem = _cuda_problem(torch.device("cuda", int(index)) if index else torch.device("cuda"), ranks)
    if problem is not None:
        raise ValueError(f"--device: {name} cannot be used: {problem}")
    return torch.device(name), None


def _cuda_problem(device: torch.device, ranks: int) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if max(device.index or 0, ranks - 1) >= torch.cuda.device_count():
        return f"torch finds {torch.cuda.device_count()} CUDA device(s)"
    bf16, fp32 = kernels.BFLOAT16, kernels.FLOAT32
    try:
        found = kernels.has_adam(device, kernels.Formats(bf16, bf16, bf16, bf16, fp32))
    except (ImportError, RuntimeError) as error:  # built without CUDA, or not for this GPU
        return str(error)
    return None if found else "this build of statestream has no CUDA kernels"


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out: {str(out)!r} is no folder to write to: {error.strerror or error}") from None
