"""CPUOffloadOptimizer: any optimizer, with its state in host memory, streamed through the device.

Memory, with S the bytes of state as it is stored (each state of each parameter padded to 256 elements), E the bytes
of the state as exported (FP32 for FusedAdam, S otherwise) and C = step_chunk_bytes:

* device, between steps: none; during a step: at most C (None: S and, unless FusedAdam is inside, the parameters);
* host: S always; S + E from `state_dict()` on while its result is held, with `state_dict_snapshot=False` S plus what
  is not stored as it is exported; S + 2E while `dcp.async_save` writes, whose stager copies once more; a load writes
  in place and needs S plus the checkpoint; with cpu_fraction or offload_gradients `plan.staging_bytes`, 48 MiB at most
  for each, on top of S, and for offloaded gradients `plan.gradient_bytes`, 4 an element.

On a machine without a GPU the same code streams through host memory: then C comes on top of S. With cpu_fraction=1
nothing does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from statestream.adam.fused_adam import FusedAdam
from statestream.adam.grad_scaling import scaling_of
from statestream.checkpoint.state_dict import as_state_dict
from statestream.device.capture import refuse_capture
from statestream.device.queues import device_for
from statestream.interrupts import interrupts_held
from statestream.memory import MemoryReport, report_of
from statestream.offload.adam.strategy import AdamStrategy
from statestream.offload.checkpoint import export_state, load_state
from statestream.offload.checks import (
    check_gradients,
    check_groups,
    check_optimizer,
    check_share,
    check_step,
    device_of,
)
from statestream.offload.gradients.accumulate import OffloadedGradients
from statestream.offload.inner_hooks import hooks_of_others
from statestream.offload.muon.strategy import MuonStrategy
from statestream.offload.muon.variants import muon_layout
from statestream.offload.one_pass import OnePassStrategy
from statestream.offload.per_parameter.strategy import PerParameterStrategy
from statestream.offload.step_plan import StepPlan, plan_of
from statestream.optimizer_hooks import call_hooks, run_step_post_hooks, run_step_pre_hooks, through_hooks
from statestream.tensors.local import is_dtensor, local_of

__all__ = ["CPUOffloadOptimizer"]


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """Keeps the state of `optimizer` in host memory and streams it through the device in chunks, in every step.

    Loads of the next chunk, the update of this one and stores of the last overlap. Results are those of the
    optimizer itself, bit for bit.

        opt = CPUOffloadOptimizer(FusedAdam(params, ...), step_chunk_bytes=1 << 30)

    Args:
        optimizer: a FusedAdam, a Muon (torch.optim.Muon; dion's, in either layout), or any elementwise torch
            optimizer. From here on use this one in its place: groups, defaults, state and hooks are shared, and the
            optimizer's own `step()` and `load_state_dict` raise. Its parameters are on one device.
        step_chunk_bytes: bound, in bytes, of all state on the device at any moment. Strict for FusedAdam, whose
            parameters are cut into ranges of elements (at least 256). Of other optimizers a parameter is the
            smallest piece, of a Muon over several ranks a batch of matrices: one that alone exceeds the bound is
            stepped alone, and a warning says so with both numbers. None: everything in one pass. `plan` tells what
            comes of it.
        per_parameter: whether each parameter's update depends on that parameter, its gradient and its state alone.
            Known for torch's optimizers, but for Adafactor of DTensors; of others it has to be said. False: all state
            moves in one pass. `elementwise` is its old name.
        cpu_fraction: how much of the update the host does itself, from 0 (all state is streamed) to 1; for FusedAdam
            alone. Of its share gradients come down and weights go up, and the state stays where it is; both sides
            work at once, and the results are the same bits. "auto": the share at which both end together, from how
            long the first steps take. Where parameters are on the CPU, 1 saves the copies, and "auto" is 1.
        cpu_threads: of the host's share. None: the cores that this process may use, divided by LOCAL_WORLD_SIZE.
            OMP_NUM_THREADS, which launchers set to 1, has no part in it, and torch's own setting is left alone.
        offload_gradients: FusedAdam alone. Gradients are added up in FP32 in host memory as backward makes them, and
            `grad` is None then: they are freed early, micro-batches are summed with nothing lost, and `step()` takes
            the sums, and uses them up. Clip with this object's `clip_grad_norm_`. Not with GradScaler, nor with
            DistributedDataParallel; fully_shard is served. Chunks hold gradients too, within step_chunk_bytes.
        state_dict_snapshot: `state_dict()` copies, so that the result does not change with later steps. False:
            live tensors, for synchronous saves where host memory is short.

    Raises:
        TypeError: a step_chunk_bytes or a per_parameter of another type; both names of per_parameter.
        ValueError: capturable or differentiable groups, LBFGS, an optimizer of which it is not known whether it is
            elementwise, a subclass of FusedAdam or an object whose own step would be left out, parameters on several
            devices, a share of the host that is out of range, or that or offload_gradients of another optimizer than
            FusedAdam.

    Warns:
        RuntimeWarning: another optimizer that offloads the gradients of these parameters is still there. This one takes
            them over, and that one refuses to step. `close()` it, or delete it, before.

    Host memory is taken here, pinned where parameters are on a GPU, in one block a kind of state; if the system
    refuses to pin it, it is pageable, with one warning. State is read through this object (`opt.state`,
    `opt.state_dict()`), which waits for the stores of the last step.

    An error in a step leaves every parameter and its state either as before or as after, every gradient in its
    place, and is raised as it came. GradScaler's found_inf is read before anything moves, which waits for the
    gradients; a skipped step moves nothing. Ctrl-C waits for the end of a step.
    """

    _exported: tuple[int | None, int | None] = (None, None)
    """Device and host bytes that the last export took."""

    @torch.no_grad()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step_chunk_bytes: int | None = None,
        *,
        per_parameter: bool | None = None,
        state_dict_snapshot: bool = True,
        cpu_fraction: float | str = 0.0,
        cpu_threads: int | None = None,
        offload_gradients: bool = False,
        elementwise: bool | None = None,
    ):
        if isinstance(optimizer, CPUOffloadOptimizer):
            raise TypeError("optimizer: it is a CPUOffloadOptimizer already")
        if elementwise is not None:
            if per_parameter is not None:
                raise TypeError("elementwise: it is the old name of per_parameter; give that alone")
            per_parameter = elementwise
        check_optimizer(optimizer, step_chunk_bytes, per_parameter)
        check_share(optimizer, cpu_fraction, cpu_threads)
        check_gradients(optimizer, offload_gradients)
        self._settings = {
            "step_chunk_bytes": step_chunk_bytes,
            "per_parameter": per_parameter,
            "state_dict_snapshot": bool(state_dict_snapshot),
            "cpu_fraction": cpu_fraction,
            "cpu_threads": cpu_threads,
            "offload_gradients": offload_gradients,
        }
        self.inner = optimizer
        self._become_optimizer()
        self._settle(self._build())

    def _become_optimizer(self) -> None:
        """What Optimizer.__init__ sets up, but for groups and state, which are the inner optimizer's."""
        has_default = "differentiable" in self.inner.defaults
        super().__setstate__({})
        if not has_default:  # torch adds it for old pickles; here it would become a group key
            self.inner.defaults.pop("differentiable", None)
        self._warned_capturable_if_run_uncaptured = True

    def _build(self) -> AdamStrategy | PerParameterStrategy | OnePassStrategy:
        device = device_for(device_of(self.inner))
        budget = self._settings["step_chunk_bytes"]
        if isinstance(self.inner, FusedAdam):
            options = {k: self._settings[k] for k in ("cpu_fraction", "cpu_threads", "offload_gradients")}
            strategy: Any = AdamStrategy(self.inner, device, budget, **options)
        elif self._settings["per_parameter"] is False:
            return OnePassStrategy(self.inner, device)
        elif (layout := muon_layout(self.inner)) is not None:
            strategy = MuonStrategy(self.inner, device, budget, layout)
        else:
            strategy = PerParameterStrategy(self.inner, device, budget)
        if complaint := plan_of(strategy).complaint(strategy.smallest):
            warnings.warn(complaint, RuntimeWarning, stacklevel=4)  # past torch.no_grad
        return strategy

    def _settle(self, strategy: AdamStrategy | PerParameterStrategy | OnePassStrategy) -> None:
        """From here on they step, and nobody else does."""
        self._strategy = strategy
        strategy.inner_hooks.begin(self.inner)
        strategy.take_over_gradients()

    @property
    def strategy(self) -> AdamStrategy | PerParameterStrategy | OnePassStrategy:
        if self._strategy is None:
            raise RuntimeError("this CPUOffloadOptimizer was closed; build a new one, and load what was saved")
        return self._strategy

    def close(self) -> None:
        """Gives back what it holds: host memory, pinned or not, and hooks on parameters. State is gone: save
        `state_dict()` before. From then on neither this optimizer nor the one inside steps, saves or loads; groups are
        still there for schedulers. Closing once more does nothing.

        Deleting the optimizer does the same. This is for where something else still holds it, such as a scheduler.
        """
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            strategy.close()

    # ---- what is shared with the inner optimizer ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, in host memory; waits for the last step's stores."""
        if "_strategy" in self.__dict__:  # which torch's constructor looks before
            self.strategy.wait()
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As of the inner optimizer; true with offload_gradients too, so that GradScaler comes to the step that
        refuses it. What is assigned to this stays."""
        assigned = self._settings.get("amp_scaling")
        if assigned is not None:
            return assigned
        return self._settings["offload_gradients"] or getattr(self.inner, "_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._settings["amp_scaling"] = bool(value)

    def __getattr__(self, name: str) -> Any:
        """Public attributes and methods of the inner optimizer, such as `train` and `eval`; methods wait for the last
        step's stores."""
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("_"):  # also while a copy or a pickle is being made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(inner, name)
        if getattr(value, "__self__", None) is not inner:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            self.strategy.wait()
            return value(*args, **kwargs)

        return method

    @property
    def step_chunk_bytes(self) -> int | None:
        return self._settings["step_chunk_bytes"]

    @property
    def state_dict_snapshot(self) -> bool:
        return self._settings["state_dict_snapshot"]

    @property
    def plan(self) -> StepPlan:
        """Bytes on the device and the host, chunks, and what does not fit the bound: known before the first step."""
        return plan_of(self.strategy)

    @property
    def cpu_fraction(self) -> float:
        """The host's share of the next step; of "auto" what it has come to."""
        return self.strategy.store.fraction

    @property
    def host_state_bytes(self) -> int:
        """Bytes of host memory that hold state."""
        return self.strategy.host_bytes

    @property
    def pinned_bytes(self) -> int:
        """How many of them are pinned."""
        return self.strategy.device.memory.pinned_bytes

    @torch._disable_dynamo
    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; host memory for the new parameters' state is taken here."""
        self._refuse_capture("add_param_group()")
        self.strategy.check_in_charge()
        self.strategy.wait()
        alone = self.plan.alone
        self.inner.add_param_group(param_group)
        try:
            check_groups(self.inner, self.inner.param_groups[-1:])
            device_of(self.inner)
            self.strategy.adopt()
        except BaseException:
            self.strategy.drop(self.inner.param_groups.pop()["params"])
            raise
        self.strategy.take_over_gradients()
        if self.plan.alone != alone:
            # past what torch.no_grad and torch._disable_dynamo wrap around this
            warnings.warn(self.plan.complaint(self.strategy.smallest), RuntimeWarning, stacklevel=5)

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As the inner optimizer does; the same is done with gradients that were offloaded."""
        if (gradients := self._gradients) is not None:
            gradients.clear(set_to_none is not False)
            gradients.attend()
        if set_to_none is None:
            self.inner.zero_grad()
        else:
            self.inner.zero_grad(set_to_none=set_to_none)

    @property
    def _gradients(self) -> OffloadedGradients | None:
        return getattr(self.strategy, "gradients", None)

    @torch._disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales gradients so that the norm of all of them is at most `max_norm`; returns the norm before, a tensor of
        one element, on every rank the norm of the whole. Call it on every rank, between backward and `step()`.

        With offload_gradients, where torch.nn.utils.clip_grad_norm_ finds no gradients: with its arithmetic, on the
        FP32 sums in host memory. DTensors on several meshes are taken together. Without, it is that function.

        Raises:
            ValueError: `norm_type` is not above 0.
            RuntimeError: the norm is not finite, with `error_if_nonfinite`; nothing was scaled.
        """
        if (gradients := self._gradients) is not None:
            self._refuse_capture("clip_grad_norm_()")
            return gradients.clip_grad_norm_(float(max_norm), float(norm_type), error_if_nonfinite)
        norm = torch.nn.utils.clip_grad_norm_(self.strategy.params(), max_norm, norm_type, error_if_nonfinite)
        return norm.full_tensor() if is_dtensor(norm) else norm

    # ---- the step ----

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **legacy: Any) -> Any:
        """One step of the inner optimizer. `closure` is evaluated once, before any state moves.

        Step hooks of this optimizer, of the inner one and torch's global ones run once each.
        """
        self._refuse_capture("step()")
        self.strategy.check_in_charge()
        check_step(self.inner)
        self.strategy.check_whole()
        args: tuple[Any, ...] = (self.inner,) if closure is None else (self.inner, closure)
        pre_hooks = hooks_of_others(self.inner)["_optimizer_step_pre_hooks"]
        args, legacy = run_step_pre_hooks(pre_hooks, self.inner, (args, legacy))
        legacy = dict(legacy)
        closure = args[1] if len(args) > 1 else legacy.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(legacy)
        run_step_post_hooks(self.inner._optimizer_step_post_hooks, self.inner, (args, legacy))
        self.inner._opt_called = True  # a scheduler that was given the inner optimizer asks
        return loss

    @staticmethod
    def _refuse_capture(what: str) -> None:
        refuse_capture(
            f"{what} of a CPUOffloadOptimizer",
            "state passes between host and device while the host runs; call it outside of the capture, or use "
            "FusedAdam(..., capturable=True) without offload",
        )

    def _update(self, legacy: dict[str, Any]) -> None:
        scaler = legacy.pop("grad_scaler", None) if isinstance(self.inner, FusedAdam) else None
        if legacy:
            raise TypeError(f"step() got an unexpected keyword argument {next(iter(legacy))!r}")
        handed = {k: self.__dict__[k] for k in ("grad_scale", "found_inf") if k in self.__dict__}
        if self._gradients is not None and (scaler is not None or handed):
            raise RuntimeError(
                "GradScaler finds no gradients to unscale, or to look for infinities in: with offload_gradients=True "
                "they are in host memory. Train in BF16, which needs no scaling, or with offload_gradients=False"
            )
        if scaler is not None:
            grad_scale, found_inf = scaling_of(self, scaler)
        else:
            grad_scale, found_inf = handed.get("grad_scale"), handed.get("found_inf")
        self.strategy.step_bytes = 0
        missing = object()
        before = {k: self.inner.__dict__.get(k, missing) for k in handed}
        try:
            with interrupts_held(), self.strategy.inner_hooks.lent():
                self.inner.__dict__.update(handed)
                self.strategy.update(grad_scale, found_inf)
        except BaseException as error:
            if self.strategy.torn and hasattr(error, "add_note"):
                error.add_note(f"updated in part: {', '.join(self.strategy.torn)}")
            raise
        finally:
            for key, value in before.items():
                if value is missing:
                    self.inner.__dict__.pop(key, None)
                else:
                    self.inner.__dict__[key] = value

    @torch._disable_dynamo
    def refresh_masters(self) -> None:
        """FusedAdam inside: as its own. Weights on a GPU come down to the masters in slices."""
        if not isinstance(self.inner, FusedAdam):
            raise TypeError(f"{type(self.inner).__name__} has no masters")
        self.strategy.wait()
        self.inner.refresh_masters()

    # ---- checkpoints ----

    @torch._disable_dynamo
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, tensors in host memory: its own keys, dtypes and sharding (FusedAdam:
        FP32). Nothing goes to the device. A snapshot unless `state_dict_snapshot=False`. RuntimeError after a step or
        a load that left parameters updated in part, until a load succeeds."""
        self._refuse_capture("state_dict()")
        self.strategy.check_in_charge()
        call_hooks(self._optimizer_state_dict_pre_hooks, self)
        with interrupts_held():
            self.strategy.wait()
            self.strategy.check_whole()
            state_dict = export_state(self.strategy, snapshot=self.state_dict_snapshot)
            self._exported = self._taken_by(state_dict)
        return through_hooks(self._optimizer_state_dict_post_hooks, self, state_dict)

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the host state in place, whatever device the values are on. All is checked first: a load that
        is refused changes nothing."""
        self._refuse_capture("load_state_dict()")
        self.strategy.check_in_charge()
        state_dict = through_hooks(self._optimizer_load_state_dict_pre_hooks, self, as_state_dict(state_dict))
        with interrupts_held():
            load_state(self.strategy, state_dict)
            self.strategy.torn.clear()
        call_hooks(self._optimizer_load_state_dict_post_hooks, self)

    # ---- memory ----

    @torch.no_grad()
    def memory_report(self) -> MemoryReport:
        """Bytes held by kind, state with its padding, and what the last step and the last export took on top. Of the
        step that is state and what restores parameters after an error; what an optimizer of another kind than
        FusedAdam allocates for itself is not known here."""
        arenas: dict[str, int] = {}
        for arena in (arena for bank in self.strategy.store.banks for arena in bank.arenas):
            arenas[arena.kind] = arenas.get(arena.kind, 0) + arena.nbytes
        if self.strategy.staging_bytes:
            arenas["staging"] = self.strategy.staging_bytes
        return report_of(
            self.strategy.params(),
            {} if self.strategy.store.banks else self.inner.state,
            getattr(self.inner, "grad_name", "grad"),
            arenas=arenas,
            exported=self._exported,
            step_device=self.strategy.step_bytes,
            pinned=self.pinned_bytes,
        )

    def _taken_by(self, state_dict: dict[str, Any]) -> tuple[int | None, int | None]:
        """Device and host bytes of an export."""
        if isinstance(self.inner, FusedAdam):
            return self.inner._exported
        if not self.state_dict_snapshot:
            return 0, 0
        values = [v for state in state_dict["state"].values() if isinstance(state, dict) for v in state.values()]
        return 0, sum(local_of(v).nbytes for v in values if isinstance(v, Tensor))

    # ---- deepcopy and pickle ----

    @torch.no_grad()
    def __getstate__(self) -> dict[str, Any]:
        self.strategy.wait()
        self.strategy.check_whole()
        gradients = {} if self._gradients is None else self._gradients.copies()
        return {"settings": self._settings, "inner": self.strategy.detached(), "gradients": gradients}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__["inner"] = state["inner"]
        self._settings = state["settings"]
        self._become_optimizer()
        self._settle(self._build())
        if self._gradients is not None:
            self._gradients.restore(state["gradients"])

    def __repr__(self) -> str:
        return f"CPUOffloadOptimizer(step_chunk_bytes={self.step_chunk_bytes}, {self.inner!r})"
