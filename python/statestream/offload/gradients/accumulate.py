"""Gradients that backward offloads: each is added to an FP32 sum in host memory once it is final, and `grad` is None.

They are taken by hooks that torch runs when a gradient was accumulated (``register_post_accumulate_grad_hook``). FSDP2
runs the same hooks of a sharded parameter itself, once its gradient is reduced and set: only then, so that
micro-batches without gradient synchronisation are summed by FSDP2 on the device, and arrive once.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from statestream.adam.gradient_hooks import GradientHooks
from statestream.adam.state_backend import checked_grad
from statestream.device.capture import refuse_capture
from statestream.offload.gradients.clipping import global_norm
from statestream.offload.gradients.staging import GradientStaging, add_up
from statestream.offload.host.arena import GRADS
from statestream.offload.host.threads import host_threads
from statestream.tensors.local import flat, is_fake, local_of

__all__ = ["GRAD_BYTES", "OffloadedGradients"]

GRAD_BYTES = 4
"""Of an element in host memory: FP32, whatever backward makes."""


class OffloadedGradients:
    """Of the parameters of `owner`, an AdamStrategy: the sums lie in its arenas.

    The sums since the last step (or zero_grad) are what the next step uses, and uses up. An error on the way of a
    gradient is raised by the next call that needs it; from then on the sums are incomplete, and steps refuse them,
    until they are dropped.
    """

    def __init__(self, owner: Any, cpu_threads: int | None):
        self._owner = weakref.ref(owner)
        self.staging = GradientStaging(lambda: max(host_threads(cpu_threads) // torch.get_num_threads(), 1))
        self._sums: dict[int, Tensor] = {}
        """By parameter, each shaped and laid out as the local parameter was when it was written."""
        self._taken_from: dict[int, int] = {}
        """Which tensor was inside the parameter then."""
        self._members: dict[int, Tensor] = {}
        self._incomplete = False
        self._backward: int | None = None
        """The backward at whose end gradients on their way are let go."""
        self._lock = threading.Lock()  # autograd calls hooks on threads of its own
        self.hooks = GradientHooks(owner.inner, self)

    @property
    def owner(self) -> Any:
        return self._owner()

    # ---- in backward ----

    def attend(self) -> None:
        """Hooks on every trained parameter, and on no other, but for those that another optimizer has taken over; host
        memory for what they take."""
        owner = self.owner
        members = {id(p): p for p in owner.params()}
        for key in [key for key, param in self._members.items() if members.get(key) is not param]:
            self._sums.pop(key, None)
        new = members.keys() != self._members.keys()
        self._members = members
        if not owner.in_charge:
            self.hooks.remove()
        else:
            new |= self.hooks.put_on(members.values(), owner.names)
        if new:
            self._prepare()

    @torch.no_grad()
    def take(self, param: Tensor, name: str) -> None:
        """Adds the parameter's gradient to its sum, and drops it."""
        owner = self.owner
        if param.grad is None or owner is None:
            return
        if owner.store.location(param) is None and all(param is not p for p in owner.params()):
            return  # the hook came here in a swap of tensors
        refuse_capture(f"the gradient of {name}, which is offloaded,", "threads of the host add it up")
        with self._lock:
            local = local_of(param)
            if local.device != owner.device.torch_device:  # the model has moved
                self.flush()
                owner.follow([param])
            self._check_shape(param, local, name)
            grad = checked_grad(param, local, param.grad, name).detach()
            first = id(param) not in self._sums
            total = self._place(param, local) if first else self.sum_of(param)
            if not is_fake(local):
                try:
                    self._bring(param, total, grad, first)
                except BaseException:
                    self._incomplete = True
                    raise
            self._sums[id(param)], self._taken_from[id(param)] = total, param._cdata
            param.grad = None

    @property
    def _device(self) -> Any:
        """The owner's, past a timeline: copies of backward are no part of a step."""
        return getattr(self.owner.device, "unrecorded", self.owner.device)

    def _bring(self, param: Tensor, total: Tensor, grad: Tensor, first: bool) -> None:
        device = self._device
        if not device.host_reaches_parameters:
            if not self.staging.nbytes:
                self._prepare()
            self.staging.take(device, id(param), flat(total), flat(grad), first)
            self._release_when_backward_ends()
            return
        if torch.cuda.is_initialized() and grad.is_pinned():
            # FSDP2 with CPUOffloadPolicy copies it there on this stream, and some versions do not wait.
            torch.cuda.current_stream().synchronize()
        add_up(flat(total), flat(grad), first)

    def _release_when_backward_ends(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):  # -1: of a gradient that was set by hand
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        with self._lock:
            self._backward = None  # FSDP2 may set its last gradients after this
            if self.owner is None:
                return
            try:
                self.staging.release(self._device)
            except BaseException:
                self._incomplete = True
                raise

    def _prepare(self) -> None:
        if not self.owner.device.host_reaches_parameters:
            params = [p for p in self.owner.params() if p.requires_grad and not is_lazy(p)]
            sizes = {id(p): local_of(p.detach()).numel() * GRAD_BYTES for p in params}
            self.staging.prepare(self._device, sum(sizes.values()))

    # ---- afterwards ----

    def gather(self) -> None:
        """Waits for all gradients on their way, and takes those that no hook took: of a parameter that was frozen until
        now, or set by hand. Raises RuntimeError where the sums are not what backward made."""
        self.hooks.check(self.owner.params(), self.owner.names)
        names = self.owner.names()
        left = [p for p in {id(p): p for p in self.owner.params()}.values() if p.grad is not None]
        for param in left:
            # Of a tensor that was swapped since no hook was run, and its gradient is one more.
            if id(param) in self._sums and self._taken_from.get(id(param)) == param._cdata:
                raise RuntimeError(
                    f"{names[id(param)]}: its gradient was set once more after backward's had been offloaded. "
                    "DistributedDataParallel does so, which reduces gradients after all hooks: use fully_shard, or "
                    "offload_gradients=False. A gradient set by hand has to be set before backward"
                )
        if self._incomplete:
            raise RuntimeError(
                "offloaded gradients are incomplete, for an error on their way to host memory; call zero_grad() and "
                "run backward again"
            )
        for param in left:
            self.take(param, names[id(param)])
        self.flush()
        self.attend()

    def flush(self) -> None:
        """Waits until every gradient that was taken is in its sum; raises the error of one that is not."""
        try:
            self.staging.finish(self._device)
        except BaseException:
            self._incomplete = True
            raise

    def has(self, param: Tensor) -> bool:
        """Whether the parameter has a sum."""
        return id(param) in self._sums

    def check(self, param: Tensor, name: str) -> None:
        """ValueError where the parameter is not what it was in backward."""
        self._check_shape(param, local_of(param), name)

    def sum_of(self, param: Tensor) -> Tensor:
        """The parameter's sum, FP32, where its state is and laid out as it is now, whatever became of the parameter
        since: a local tensor."""
        total, place = self._sums[id(param)], self._place(param, local_of(param))
        if total.data_ptr() != place.data_ptr() or total.stride() != place.stride():
            self.flush()
            self._sums[id(param)] = place.copy_(total.clone())
        return self._sums[id(param)]

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ does, with the sums."""
        self.gather()
        params, names = list({id(p): p for p in self.owner.params()}.values()), self.owner.names()
        for param in params:
            self.check(param, names[id(param)])
        sums = {id(p): self.sum_of(p) for p in params if self.has(p)}
        norm = global_norm([(p, sums.get(id(p))) for p in params], norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm.item()}; nothing was clipped. To clip "
                "nevertheless, pass error_if_nonfinite=False"
            )
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if factor != 1.0:
            for total in sums.values():
                total.mul_(factor)
        return norm

    def clear(self, set_to_none: bool = True) -> None:
        """Drops the sums, or makes them zero, and whatever was wrong with them."""
        with contextlib.suppress(Exception):  # of gradients that nobody wants any more
            self.flush()
        self._incomplete = False
        if set_to_none:
            self._sums.clear()
        for total in self._sums.values():
            total.zero_()

    def copies(self) -> dict[int, Tensor]:
        """The sums by the parameter's place among all parameters, each in memory of its own."""
        self.flush()
        return {i: self._sums[id(p)].clone() for i, p in enumerate(self.owner.params()) if self.has(p)}

    def restore(self, copies: dict[int, Tensor]) -> None:
        """What `copies` gave."""
        for i, param in enumerate(self.owner.params()):
            if i in copies:
                self._sums[id(param)] = self._place(param, local_of(param)).copy_(copies[i])

    # ---- where they are ----

    def _place(self, param: Tensor, local: Tensor) -> Tensor:
        location = self.owner.location_of(param)
        arena = location.bank.arenas[self.owner.kinds.index(GRADS)]
        with torch.inference_mode(False):
            return arena.view(location.index, torch.float32, local)

    def _check_shape(self, param: Tensor, local: Tensor, name: str) -> None:
        total = self._sums.get(id(param))
        if total is not None and total.shape != local.shape:
            raise ValueError(
                f"{name}: its local shape is {tuple(local.shape)}, and gradients of {tuple(total.shape)} were "
                "offloaded; call zero_grad() after such a change"
            )
