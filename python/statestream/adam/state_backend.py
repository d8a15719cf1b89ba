"""Where FusedAdam's state lives, how it follows its parameter, what is exported of it, and how a step runs.

A step checks everything while it gathers the rows of its kernel calls, before any kernel runs, so that a refused step
changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from statestream import kernels
from statestream.adam.calls import Call, Job
from statestream.adam.grad_scaling import StepNumbers, count_on_device, device_scalars
from statestream.adam.rounding import Rounding
from statestream.arguments import PARAM_DTYPES, check_grad_dtype, check_param, name_in
from statestream.kernels import Formats
from statestream.kernels.abi import scale_address
from statestream.kernels.rows import runs_for
from statestream.state.factory import StateFactory
from statestream.state.state_format import MASTER, MOMENTS, STATES, STEP, StateFormat
from statestream.state.stored import Stored
from statestream.tensors.global_index import runs_of
from statestream.tensors.local import is_dense, local_of, same_layout
from statestream.tensors.quantized import is_quantized, requantize
from statestream.tensors.sharding import redistribute_like
from statestream.tensors.validate import check_has_data
from statestream.tensors.write_tracker import WriteTracker

__all__ = ["ResidentState", "StateBackend", "checked_grad"]


class SteppedOptimizer(Protocol):
    """What the step of a backend asks of the optimizer."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    @property
    def grad_name(self) -> str: ...

    def check_gradients(self) -> None: ...


class StateBackend(StateFactory, ABC):
    """The contract, and what every backend shares: which kernel calls a step is, and what comes before and after each.

    StateFactory says how state is made, where it lies and what is exported of it. No backend holds the optimizer.

    A parameter with a master that was written since the last step (a loaded model, an edit under no_grad) is brought
    back together with its master first: where they no longer round to each other, the parameter wins. A quantised
    parameter is no tensor that a kernel could update: the kernel updates its FP32 master, and the result is quantised.
    """

    offloaded = False
    """Whether a CPUOffloadOptimizer has the state, and steps it."""
    step_bytes: int | None = None
    """Device memory that the last step took for state, in bytes; None before the first."""

    def __init__(self, state_format: StateFormat, rounding: Rounding):
        super().__init__(state_format)
        self.rounding = rounding
        self.write_tracker = WriteTracker()

    @abstractmethod
    def step(self, optimizer: SteppedOptimizer, numbers: StepNumbers) -> None:
        """One update of every parameter that has a gradient. Everything is checked before anything is changed."""

    def computing(self) -> AbstractContextManager[Any]:
        """Within, torch's operations on gradients come before those of the next step."""
        return nullcontext()

    def detached(self, optimizer: SteppedOptimizer) -> SteppedOptimizer:
        """An optimizer to be copied or pickled in the place of `optimizer`: its state is in memory of its own."""
        return optimizer

    # ---- the kernel calls of a step ----

    def calls(
        self,
        group: dict[str, Any],
        number: int,
        state: dict[Tensor, dict[str, Any]],
        grad_name: str,
        first_ordinal: int,
    ) -> list[Call]:
        """The kernel calls that update the parameters of the optimizer's group `number`, without running them.

        Parameters whose gradient (the attribute `grad_name`) is None are left out. Each is taken once,
        however often it is listed. The random bits of parameter i of the group are those of parameter
        `first_ordinal` + i.
        """
        params = group["params"]
        state_format = self.state_format
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
            scales=self.scales,
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
            name = name_in(group, number, i)
            local = self.check(params[i], name)
            grad = checked_grad(params[i], local, getattr(params[i], grad_name), name)
            self._add(calls, self.job(params[i], local, grad, state[params[i]], name, first_ordinal + i))
        return list(calls.values())

    def check(self, param: Tensor, name: str) -> Tensor:
        """The local tensor of a parameter that can be updated, and have state. Raises, naming it, where it cannot."""
        local = local_of(param)
        check_param(local, name)
        self.state_format.check(local, name)
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
        self.follow(param, state)
        states = {key: self.stored(param, key, state[key]) for key in STATES if key in state}
        codes = [kernels.state_format_of(states[key].local) if key in states else kernels.NONE for key in STATES]
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
        exp_avg, exp_avg_sq = (job.states[kind].local for kind in MOMENTS)
        master = None if job.formats.master == kernels.NONE else job.states[MASTER].local
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
        call.add(job, row, [_scale_address(job.states.get(kind), job.local.numel()) for kind in STATES])

    def refresh(self, call: Call, state: dict[Tensor, dict[str, Any]]) -> None:
        """Brings the call's masters back to parameters that were written since the last step."""
        for param, local in self.write_tracker.written(*_watched(call)):
            self.stored(param, MASTER, state[param][MASTER]).refresh(local)

    @contextmanager
    def advanced(self, call: Call, found_inf: Tensor | None) -> Iterator[None]:
        """For the kernel call: the counters that it does not advance are advanced, and put back where it fails."""
        if not call.counters:
            yield
            return
        before = [counter.clone() for counter in call.counters]
        where = call.device if self.state_format.step_on_device else torch.device("cpu")
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
        self.write_tracker.remember(*_watched(call))


class ResidentState(StateBackend):
    """State beside its parameter, on the same device, updated by one kernel call for each device and set of formats."""

    def step(self, optimizer: SteppedOptimizer, numbers: StepNumbers) -> None:
        capturable = self.state_format.step_on_device
        grad_scale, found_inf = numbers.scaling
        groups = optimizer.param_groups
        before = accumulate((len(group["params"]) for group in groups), initial=0)
        plan = [
            (group, options, self.calls(group, number, optimizer.state, optimizer.grad_name, first))
            for number, (group, options, first) in enumerate(zip(groups, numbers.options, before, strict=False))
        ]
        if not any(calls for _, _, calls in plan):
            optimizer.check_gradients()
        read_there = [
            device_scalars(group, {call.device for call in calls}, grad_scale, found_inf) if capturable else {}
            for group, _, calls in plan
        ]
        for (group, options, calls), on in zip(plan, read_there, strict=True):
            for call in calls:
                scalars = on.get(call.device)
                self.refresh(call, optimizer.state)
                with self.advanced(call, None if scalars is None else scalars.found_inf):
                    call.run(
                        options,
                        seed=self.rounding.seed,
                        grad_scale=numbers.grad_scale,
                        advance=not call.counters,
                        scalars=scalars,
                    )
                self.updated(call)
            if capturable:
                count_on_device(group, found_inf)
            else:
                group[STEP] += 1
        self.step_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # What was noticed of writes is of these parameters: copies have others.
        return type(self), (self.state_format, self.rounding), {"scales": self.scales}


def checked_grad(param: Tensor, local: Tensor, grad: Tensor, name: str) -> Tensor:
    """The local gradient, sharded and laid out as the parameter is. Raises, naming the parameter, where no kernel can
    read it."""
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
            raise ValueError(f"{name}: {what} of class {type(tensor).__name__} are not supported; use dense tensors")
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
