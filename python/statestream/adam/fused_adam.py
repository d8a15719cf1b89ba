"""FusedAdam: Adam and AdamW in one pass over parameters, gradients, moments and masters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from statestream.adam.checkpoint import Checkpointing
from statestream.adam.grad_scaling import (
    device_of_scalar,
    needs_scaled_gradients,
    numbers_of,
    scaling_of,
    unscale_gradients,
)
from statestream.adam.gradient_hooks import GradientHooks
from statestream.adam.rounding import Rounding
from statestream.adam.state_backend import ResidentState, StateBackend
from statestream.arguments import (
    as_bytes,
    as_dtype,
    as_number,
    check_group_options,
    names_of,
)
from statestream.checkpoint.transfer import LEAST_STAGING_BYTES
from statestream.device.capture import check_settings_on_device, is_capturing, refuse_capture
from statestream.formats import Role
from statestream.interrupts import interrupts_held
from statestream.memory import MemoryReport, report_of
from statestream.state.format_version import number_of
from statestream.state.lazy_state import LazyState, peek
from statestream.state.state_format import MASTER, STEP, StateFormat
from statestream.tensors.local import is_dense, local_of

__all__ = ["FusedAdam"]


class FusedAdam(Checkpointing, torch.optim.Optimizer):
    """Adam and AdamW with small state, a fused step and a checkpoint export of bounded memory.

    A drop-in for ``torch.optim.AdamW`` and for Transformer Engine's ``FusedAdam``. The update is that of
    Kingma & Ba 2015 with the decoupled weight decay of Loshchilov & Hutter 2019, all in FP32, whatever
    the state is stored in; the same bits on CPU and CUDA, for any number of threads and any sharding.

    Args:
        params: parameters, ``(name, parameter)`` pairs or group dicts, as AdamW takes them: frozen ones of any dtype,
            lazy ones, a group over several devices. What is trained is float32, bfloat16 or float16 and dense, or wraps
            one such tensor, as torchao's float8 weights do; or it is quantised, as Transformer Engine's are
            (``dequantize(dtype=)`` and ``quantize_(values)``), and needs master_weights=True: its FP32 master is
            updated, and then quantised. Anything else is refused by the first step in which it has a gradient.
        lr: learning rate, a number or a tensor of one element (copied, one for each group).
        betas, eps, weight_decay: as in ``torch.optim.AdamW``. Note that weight_decay defaults to 0.
        amsgrad: refused.
        bias_correction: divide the moments by ``1 - beta**step``.
        adam_w_mode: True: weight decay on the weight (AdamW); False: added to the gradient (Adam, L2).
        capturable: lr and step counters are tensors on the parameter's device, for CUDA graphs.
        master_weights: keep masters of bfloat16 and float16 parameters. Without, weights are updated in
            place and updates below half a unit in their last place are lost.
        master_weight_dtype: torch.float32, or torch.float16 in blocks with scales, which hold weights exactly that are
            at least 2**-32 of the largest in their block.
        exp_avg_dtype, exp_avg_sq_dtype: how the moments are stored: torch.float32, torch.bfloat16, torch.float16 or
            FP8 (torch.float8_e4m3fn, in the peer's spelling torch.uint8), also as a string ("torch.bfloat16", "bf16",
            "fp8"). Of the last two each block of 256 elements has a float32 scale, kept beside `state`.
        use_decoupled_grad: read ``param.decoupled_grad`` instead of ``param.grad``; it may have another
            dtype than the parameter.
        store_param_remainders: instead of FP32 masters store the 16 bits that a BF16 weight lacks; 2
            bytes an element less. Needs master_weights=True. Float16 and quantised parameters keep FP32 masters.
        foreach, fused: accepted as AdamW takes them, also in groups, and of no effect: every step is fused.
        differentiable: refused if true.
        set_grad_none: deprecated; pass set_to_none to zero_grad.
        state_dict_cpu_offload: ``state_dict()`` makes FP32 copies in host memory, one state after
            another, needing `export_staging_bytes` of device memory rather than 8 bytes an element.
        export_staging_bytes: device memory of an export or a load, in bytes; freed after each.
        maximize: ascend instead of descend.
        stochastic_rounding: round for storage by random bits, so that small updates count on average. True: all that
            is stored with fewer bits than it has, moments and BF16 parameters without masters; or names of it:
            "exp_avg", "exp_avg_sq", "param". A scaled exp_avg_sq always is rounded so.
        seed: of those bits, 64 of them. They hang on nothing else but the parameter's position over all groups, its
            step and the element's index in the whole tensor: not on the sharding, the device or a restart. No part of
            a checkpoint: give the same again.

    Raises:
        ValueError: an argument is out of range, or a dtype is not supported, or is not rounded as asked.
        RuntimeError: amsgrad, differentiable, capturable with remainders. From a step: sparse gradients, quantised
            parameters without masters or with capturable.

    State of parameter p, ``optimizer.state[p]``, made when first read: ``exp_avg``, ``exp_avg_sq`` and
    perhaps ``master_param`` (shaped and sharded as p), and ``step`` (0-dim float32, counts p's updates).
    ``state_dict()`` holds moments and masters as float32, remainders as int16, and no scales.
    """

    _hooks: GradientHooks | None = None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype | str = torch.float32,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        set_grad_none: bool | None = None,
        state_dict_cpu_offload: bool = False,
        export_staging_bytes: int = 64 * 1024 * 1024,
        maximize: bool = False,
        stochastic_rounding: bool | Sequence[str] = False,
        seed: int = 0,
    ):
        if store_param_remainders and not master_weights:
            raise ValueError("store_param_remainders=True needs master_weights=True")
        if store_param_remainders and capturable:
            raise RuntimeError("capturable=True does not support store_param_remainders=True; use FP32 masters")
        self.state_format = StateFormat(
            exp_avg=as_dtype("exp_avg_dtype", exp_avg_dtype, Role.MOMENT),
            exp_avg_sq=as_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype, Role.MOMENT),
            master_weights=bool(master_weights),
            master=as_dtype("master_weight_dtype", master_weight_dtype, Role.MASTER),
            remainders=bool(store_param_remainders),
            step_on_device=bool(capturable),
        )
        if store_param_remainders and self.state_format.master is not torch.float32:
            raise ValueError(
                "store_param_remainders=True keeps the rest of FP32 masters; "
                f"master_weight_dtype={self.state_format.master} has none"
            )
        self.rounding = Rounding.checked(stochastic_rounding, seed, self.state_format)
        self.exp_avg_dtype, self.exp_avg_sq_dtype = self.state_format.exp_avg, self.state_format.exp_avg_sq
        self.master_weight_dtype = self.state_format.master
        self.master_weights = bool(master_weights)
        self.store_param_remainders = bool(store_param_remainders)
        self.adam_w_mode = bool(adam_w_mode)
        self.capturable = bool(capturable)
        self.use_decoupled_grad = bool(use_decoupled_grad)
        self.state_dict_cpu_offload = bool(state_dict_cpu_offload)
        self.export_staging_bytes = as_bytes("export_staging_bytes", export_staging_bytes, LEAST_STAGING_BYTES)
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; pass set_to_none to zero_grad", DeprecationWarning, stacklevel=2
            )
        # AdamW's keys and three more. They are fixed for good: DCP's flat load fails on a key that
        # either side lacks.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": bool(maximize),
            "foreach": foreach,
            "capturable": self.capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": self.adam_w_mode,
            "bias_correction": bool(bias_correction),
            STEP: 0,
            "format_version": number_of(self.state_format.masters()),
        }
        check_group_options(defaults)
        self._members: set[int] = set()
        self.keep_state_with(ResidentState(self.state_format, self.rounding))
        super().__init__(params, defaults)
        self.state = LazyState(self._make_state)
        self._hooks = GradientHooks(self)
        self._take_over(self.param_groups)

    # ---- parameters and their state ----

    @property
    def backend(self) -> StateBackend:
        """Where the state lives, how it follows its parameter, what an export of it is, and how a step runs."""
        return self._backend

    def keep_state_with(self, backend: StateBackend) -> None:
        """From here on `backend` makes, keeps and steps the state. State that is there is left to the caller."""
        self._backend = backend

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; options and parameters are checked first, and a refused group leaves no trace."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, not {type(param_group).__name__}")
        group = dict(param_group)
        params = group["params"]
        if not isinstance(params, set):  # which has no order: torch refuses it
            group["params"] = [params] if isinstance(params, Tensor) else list(params)
        number = len(self.param_groups)
        check_group_options({**self.defaults, **group}, where=f" of group {number}" if number else "")
        super().add_param_group(group)
        try:
            self._take_settings(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._take_over(self.param_groups[-1:])

    def _take_over(self, groups: list[dict[str, Any]]) -> None:
        """Their gradients, from an optimizer that offloads them. A CPUOffloadOptimizer over this one does it itself."""
        if self._hooks is not None and not self._backend.offloaded:
            params = chain.from_iterable(group["params"] for group in groups)
            self._hooks.take_over(params, lambda: names_of(self.param_groups))

    def _take_settings(self, added: dict[str, Any]) -> None:
        added["betas"] = tuple(added["betas"])  # a configuration's list is no value for a checkpoint
        # A tensor of its own: two groups that share one would take each other's schedule.
        if isinstance(added["lr"], Tensor):
            added["lr"] = added["lr"].detach().clone()
        if self.capturable:
            device = device_of_scalar(added, added["lr"])
            added["lr"] = torch.as_tensor(added["lr"], dtype=torch.float32, device=device)
            added[STEP] = torch.tensor(as_number(added[STEP]), dtype=torch.float32, device=device)

    @torch._disable_dynamo  # a state may be read first in a compiled function
    def _make_state(self, param: Tensor) -> dict[str, Any] | None:
        if id(param) not in self._members:
            self._members = {id(p) for p in self._params()}
            if id(param) not in self._members:
                return None
        with torch.no_grad():
            return self._backend.make(param) if self._backend.takes(param) else {}

    def _params(self) -> Iterable[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    # ---- the step ----

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **legacy: Any) -> Any:
        """One update of every parameter that has a gradient.

        `closure` reevaluates the model and returns the loss. Where `_step_supports_amp_scaling` is true, torch's
        GradScaler sets ``grad_scale`` and ``found_inf`` on the optimizer. Gradients are then divided by grad_scale in
        FP32, and `grad` is left divided, rounded to its dtype. A nonzero found_inf skips the step, counts nothing and
        leaves `grad` as it is. ``grad_scaler=`` is accepted as Transformer Engine's optimizer takes it.
        Everything is checked before anything is changed.
        """
        if is_capturing():
            self._check_captured()
        scaler = legacy.pop("grad_scaler", None)
        if legacy:
            raise TypeError(f"step() got an unexpected keyword argument {next(iter(legacy))!r}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with interrupts_held():
            self.update(*scaling_of(self, scaler))
        return loss

    def _check_captured(self) -> None:
        if not self.capturable:
            refuse_capture(
                "step() of a FusedAdam with capturable=False",
                "replays would take this step's learning rate and count every time; build it with capturable=True",
            )
        check_settings_on_device(self.param_groups)

    def update(self, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """What `step()` does between its hooks. Gradients are divided by `grad_scale`; nothing happens where
        `found_inf` is not zero."""
        self.check_whole()
        numbers = numbers_of(self.param_groups, grad_scale=grad_scale, found_inf=found_inf, capturable=self.capturable)
        if numbers.skipped:
            return
        if self._backend.offloaded:
            vars(self).pop("_lent", None)  # the class has None: autograd counts the stores of such a step
        self._backend.step(self, numbers)
        if grad_scale is not None:
            with self._backend.computing():
                unscale_gradients(self._params(), self.grad_name, grad_scale, found_inf if self.capturable else None)
        self._forget_replaced()

    def check_gradients(self) -> None:
        """RuntimeError where gradients of some parameters go to another optimizer."""
        if self._hooks is not None:
            self._hooks.check(self._params(), lambda: names_of(self.param_groups))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves unscaling and skipping to step(): where it cannot do both itself. It refuses FP16
        gradients, does not know `decoupled_grad`, and makes the host wait, which capturable excludes. What is assigned
        to this stays."""
        assigned = self.__dict__.get("_amp_scaling")
        if assigned is not None:
            return assigned
        return self.capturable or self.use_decoupled_grad or needs_scaled_gradients(self._params())

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._amp_scaling = bool(value)

    @property
    def grad_name(self) -> str:
        """The attribute of a parameter that holds its gradient."""
        return "decoupled_grad" if self.use_decoupled_grad else "grad"

    def _forget_replaced(self) -> None:
        """Holds no parameters any more that were replaced in their groups, and their state taken out, by hand."""
        scales, watch = self._backend.scales, self._backend.write_tracker
        if len(scales) > len(self.state):
            for param in [param for param in scales if peek(self.state, param) is None]:
                self._backend.forget(param)
        if watch.count > sum(len(group["params"]) for group in self.param_groups):
            members = {id(param) for param in self._params()}
            for param in watch.params():
                if id(param) not in members:
                    watch.forget(param)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As in torch; with use_decoupled_grad it clears ``decoupled_grad``."""
        if set_to_none is None:
            set_to_none = True if self.set_grad_none is None else self.set_grad_none
        elif self.set_grad_none not in (None, set_to_none):
            raise ValueError(
                f"zero_grad(set_to_none={set_to_none}) contradicts set_grad_none={self.set_grad_none} "
                "of the constructor"
            )
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for param in self._params():
            if set_to_none:
                param.decoupled_grad = None
            elif getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad.detach_().zero_()

    @torch._disable_dynamo
    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Brings masters back to weights that were written through ``.data``, which leaves no
        trace; every other write is noticed by the next step and the next save. Where a master still rounds to its
        weight it stays."""
        params, locals = [], []
        for param in self._params():
            state = peek(self.state, param)
            if state is None or MASTER not in state:
                continue
            self._backend.follow(param, state)
            if MASTER in state and state[MASTER].dtype is not torch.int16:
                local = local_of(param)
                if is_dense(local):  # no step takes another
                    self._backend.stored(param, MASTER, state[MASTER]).refresh(local)
                    params.append(param)
                    locals.append(local)
        with interrupts_held():
            self._backend.write_tracker.remember(params, locals)

    # ---- memory ----

    @torch.no_grad()
    def memory_report(self) -> MemoryReport:
        """Bytes held by kind, and what the last step and the last export took on top. State that was not made yet
        is not counted, nor made. A step here takes no device memory of its own."""
        return report_of(
            self._params(),
            {param: self._backend.with_scales(param, peek(self.state, param)) for param in self._params()},
            self.grad_name,
            step_device=self._backend.step_bytes,
            exported=self._exported,
        )

    # ---- deepcopy and pickle ----

    def __getstate__(self) -> dict[str, Any]:
        self.check_whole()
        detached = self._backend.detached(self)
        if detached is not self:
            return detached.__getstate__()
        # torch's own keeps only defaults, state and groups. A method set on the object, as a scheduler
        # wraps step(), is bound to this one: a copy would step the original.
        hidden = ("_members", "_lent", "_hooks")
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in hidden and not key.startswith("_optimizer_") and not hasattr(type(self), key)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._members = set()
        self._hooks = GradientHooks(self)
        if isinstance(self.state, LazyState):
            self.state.make = self._make_state
