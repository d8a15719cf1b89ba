"""What step() asks of the kernels: parameters with gradients, as rows that share a kernel call.

Everything is checked while the rows are gathered, before any kernel runs, so a refused step changes
nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from statestream import kernels
from statestream.adam.rounding import Rounding
from statestream.arguments import PARAM_DTYPES, check_grad_dtype, check_param
from statestream.kernels import AdamOptions, Formats
from statestream.kernels.abi import scale_address
from statestream.kernels.rows import add_rows, runs_for
from statestream.state.factory import StateFactory
from statestream.state.state_format import MASTER, MOMENTS, STEP
from statestream.state.stored import Stored
from statestream.tensors.global_index import Run, runs_of
from statestream.tensors.local import is_dense, local_of, same_layout
from statestream.tensors.quantized import is_quantized, requantize
from statestream.tensors.sharding import redistribute_like
from statestream.tensors.validate import check_has_data
from statestream.tensors.write_tracker import WriteTracker

__all__ = ["Call", "Job", "StepTable"]


KINDS = (*MOMENTS, MASTER)


@dataclass(kw_only=True)
class Job:
    """What a step asks of one parameter, checked. Tensors are local."""

    name: str
    param: Tensor
    local: Tensor
    target: Tensor
    """What a kernel updates: `local`, or the FP32 master of a quantised parameter."""
    grad: Tensor
    states: dict[str, Stored]
    counter: Tensor
    formats: Formats
    stochastic: int
    ordinal: int
    """The parameter's number over all groups."""
    runs: tuple[Run, ...] = ()

    @property
    def needs_extras(self) -> bool:
        return bool(self.stochastic) or self.formats.has_scales


@dataclass
class Call:
    """One kernel call: rows on one device with the same formats, and `extras` where they need some."""

    device: torch.device
    formats: Formats
    rows: array = field(default_factory=lambda: array("q"))
    extras: array | None = None
    stochastic: int = 0
    counters: list[Tensor] = field(default_factory=list)
    """Counters of parameters that are several rows each: advanced before the call, which then advances none."""
    params: list[Tensor] = field(default_factory=list)
    locals: list[Tensor] = field(default_factory=list)
    """The local tensors of `params`."""
    keep: list[Any] = field(default_factory=list)
    """What rows point into, alive until the kernel has run: gradients copied into the parameter's layout, say."""
    quantized: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of `params` those in whose place a kernel updates their FP32 master, each with it."""

    def add(self, job: Job, row: tuple[int, ...], scales: Sequence[int], first: int = 0) -> None:
        """A row of the job's elements from `first` on, and the addresses of their first scales. An empty row is one of
        tensors without data."""
        if not row:
            return
        if not job.needs_extras:
            self.rows.extend(row)
            return
        if self.extras is None:
            self.extras = array("q")
        add_rows(
            self.rows,
            self.extras,
            row,
            job.formats,
            ordinal=job.ordinal,
            first=first,
            runs=job.runs,
            scales=tuple(scales),
        )

    def run(self, options: AdamOptions, *, seed: int, **how: Any) -> None:
        """Queues the kernel; `how` are further arguments of kernels.adam."""
        kernels.adam(
            self.device,
            self.rows,
            self.formats,
            options,
            extras=self.extras,
            seed=seed,
            stochastic=self.stochastic,
            **how,
        )


class StepTable:
    """Gathers calls, and remembers what each parameter looked like after the last step.

    A parameter with a master that was written since (a loaded model, an edit under no_grad) is
    brought back together with its master first: where they no longer round to each other, the parameter
    wins. A quantised parameter is no tensor that a kernel could update: its FP32 master is the row's
    parameter, and what the kernel leaves there is quantised.
    """

    def __init__(self, factory: StateFactory, rounding: Rounding):
        self.factory, self.rounding = factory, rounding
        self.watch = WriteTracker()

    def calls(
        self,
        params: list[Tensor],
        state: dict[Tensor, dict[str, Any]],
        grad_name: str,
        name_of: Callable[[int], str],
        first_ordinal: int,
    ) -> list[Call]:
        """The kernel calls that update `params`, without running them.

        Parameters whose gradient (the attribute `grad_name`) is None are left out. Each is taken once,
        however often it is listed. The random bits of params[i] are those of parameter `first_ordinal` + i.
        """
        state_format = self.factory.state_format
        calls: dict[Any, Call] = {}
        # Where random bits hang on indices in the whole tensor, a shard's are looked at one by one.
        needs_extras = state_format.has_scales or bool(self.rounding.flags)
        found, left = kernels.gather(
            params,
            grad_name,
            state,
            exp_avg=state_format.exp_avg,
            exp_avg_sq=state_format.exp_avg_sq,
            masters={dtype: state_format.master_of(dtype) for dtype in PARAM_DTYPES},
            step_on_device=state_format.step_on_device,
            scales=self.factory.scales,
            sharded=not needs_extras,
            extras=needs_extras,
            first_ordinal=first_ordinal,
        )
        for g in found:
            stochastic = self.rounding.of(g.formats)
            extras = g.extras if stochastic or g.formats.has_scales else None
            call = Call(g.device, g.formats, g.rows, extras, stochastic, params=g.params, locals=g.locals)
            calls[g.device, g.formats, False] = call
        for i in left:
            name = name_of(i)
            local = self.check(params[i], name)
            grad = self.checked_grad(params[i], local, getattr(params[i], grad_name), name)
            self._add(calls, self.job(params[i], local, grad, state[params[i]], name, first_ordinal + i))
        return list(calls.values())

    def check(self, param: Tensor, name: str) -> Tensor:
        """The local tensor of a parameter that can be updated, and have state. Raises, naming it, where it cannot."""
        local = local_of(param)
        check_param(local, name)
        self.factory.state_format.check(local, name)
        self.rounding.check(local, name)
        return local

    def takes(self, param: Tensor) -> bool:
        """Whether the parameter can be updated, and have state."""
        try:
            self.check(param, "parameter")
        except (ValueError, RuntimeError):
            return False
        return True

    def job(self, param: Tensor, local: Tensor, grad: Tensor, state: dict[str, Any], name: str, ordinal: int) -> Job:
        """What a step asks of a parameter whose local tensor and gradient are checked. Its state follows it."""
        if not is_quantized(local):
            check_has_data(local, name)
        self.factory.follow(param, state)
        states = {key: self.factory.stored(param, key, state[key]) for key in KINDS if key in state}
        codes = [kernels.state_format_of(states[key].local) if key in states else kernels.NONE for key in KINDS]
        target = local
        if is_quantized(local):
            target, codes[-1] = states[MASTER].local, kernels.NONE
        formats = Formats(kernels.format_of(target), kernels.format_of(grad), *codes)
        job = Job(
            name=name,
            param=param,
            local=local,
            target=target,
            grad=grad,
            states=states,
            counter=state[STEP],
            formats=formats,
            stochastic=self.rounding.of(formats),
            ordinal=ordinal,
        )
        if job.needs_extras:
            job.runs = runs_for(formats, runs_of(param))
        return job

    def _add(self, calls: dict[Any, Call], job: Job) -> None:
        for key, kept in job.states.items():
            check_has_data(kept.local, f"{key} of {job.name}")
        tensors = [kept.local for kept in job.states.values() if kept.local is not job.target]
        exp_avg, exp_avg_sq, master = (*tensors, None) if len(tensors) == len(MOMENTS) else tensors
        row = kernels.row(job.target, job.grad, exp_avg, exp_avg_sq, master, job.counter)
        in_rows = job.needs_extras and len(job.runs) != 1
        key = job.local.device, job.formats, in_rows
        call = calls.setdefault(key, Call(job.local.device, job.formats, stochastic=job.stochastic))
        if call.locals is call.params:  # as gather leaves whole parameters
            call.locals = list(call.params)
        call.params.append(job.param)
        call.locals.append(job.local)
        call.keep.append(job.grad)
        if job.target is not job.local:
            call.quantized.append((job.param, job.target))
        if in_rows:
            call.counters.append(job.counter)
        call.add(job, row, [_scale_address(job.states.get(kind), job.local.numel()) for kind in KINDS])

    def refresh(self, call: Call, state: dict[Tensor, dict[str, Any]]) -> None:
        """Brings the call's masters back to parameters that were written since the last step."""
        for param, local in self.watch.written(*_watched(call)):
            self.factory.stored(param, MASTER, state[param][MASTER]).refresh(local)

    @contextmanager
    def advanced(self, call: Call, found_inf: Tensor | None) -> Iterator[None]:
        """For the kernel call: the counters that it does not advance are advanced, and put back where it fails."""
        if not call.counters:
            yield
            return
        before = [counter.clone() for counter in call.counters]
        where = call.device if self.factory.state_format.step_on_device else torch.device("cpu")
        try:
            kernels.advance_steps(where, call.counters, found_inf)
            yield
        except BaseException:
            for counter, value in zip(call.counters, before, strict=True):
                counter.copy_(value)
            raise

    def updated(self, call: Call) -> None:
        """Quantises the masters that kernels wrote, and says that the parameters were written: autograd is told, and
        the next step knows them."""
        for param, master in call.quantized:
            requantize(local_of(param), master)
        torch.autograd.graph.increment_version(call.params)
        if call.locals is not call.params:
            torch.autograd.graph.increment_version(
                [local for param, local in zip(call.params, call.locals, strict=True) if local is not param]
            )
        self.watch.remember(*_watched(call))

    @staticmethod
    def checked_grad(param: Tensor, local: Tensor, grad: Tensor, name: str) -> Tensor:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{name}: FusedAdam does not support sparse gradients ({grad.layout}); use torch.optim.SparseAdam"
            )
        if not is_dense(local):
            raise ValueError(
                f"{name}: strides {local.stride()} of shape {tuple(local.shape)} leave gaps or overlap; "
                "make the parameter contiguous"
            )
        if grad.shape != param.shape:
            raise ValueError(f"{name}: gradient of shape {tuple(grad.shape)}, parameter of {tuple(param.shape)}")
        grad = local_of(redistribute_like(grad, param, name)).resolve_neg()
        for tensor, what in ((local, "parameters"), (grad, "gradients")):
            if is_traceable_wrapper_subclass(tensor) and not (tensor is local and is_quantized(local)):
                raise ValueError(
                    f"{name}: {what} of class {type(tensor).__name__} are not supported; use dense tensors"
                )
        check_grad_dtype(grad, name)
        check_has_data(grad, f"gradient of {name}")
        if grad.device != local.device or grad.shape != local.shape:
            raise ValueError(
                f"{name}: local gradient {tuple(grad.shape)} on {grad.device}, local parameter "
                f"{tuple(local.shape)} on {local.device}"
            )
        if same_layout(grad, local):
            return grad
        return torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device=local.device).copy_(grad)


def _watched(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters with masters beside them, or quantised from them, and their local tensors."""
    if call.formats.has_master:
        return call.params, call.locals
    quantized = [param for param, _ in call.quantized]
    return quantized, [local_of(param) for param in quantized]


def _scale_address(stored: Stored | None, numel: int) -> int:
    if stored is None or stored.scale is None:
        return 0
    return scale_address("scale", stored.scale, 0, numel)
