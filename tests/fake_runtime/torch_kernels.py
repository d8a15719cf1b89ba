"""torch's own CUDA kernels, done by its CPU kernels on the same memory.

Every operator that has a kernel for CUDA gets another one in its place, which queues the operation on the current
stream of its device: with addresses, sizes and strides, and no tensor, so that memory that was freed too early is seen.
What it returns is made at once, by shape (the operator on `meta`). An operator whose result has a shape that depends on
data, or that has no kernel for `meta`, waits for the stream and runs at once: `ran_at_once` holds their names. Views
and allocations are torch's own; new memory is filled with poison, on its stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fake_runtime.runtime import lib

__all__ = ["install", "ran_at_once"]

ran_at_once: set[str] = set()

_OWN = {"resize_", "set_", "record_stream", "_local_scalar_dense", "is_set_to", "_resize_output_", "_pin_memory"}
"""Operators that launch no kernel, and are torch's own here."""
_ALLOCATIONS = {"empty.memory_format", "empty_strided"}
_MIXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operators that take tensors on the CPU, of any size, beside those on the device."""

_library = torch.library.Library("aten", "IMPL")
_numbers = itertools.count(1)
_queued: dict[int, Callable[[], None]] = {}
_captured: set[int] = set()


def install() -> None:
    lib.use_python(_run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every operator is said to have another kernel now
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                _replace(name.removeprefix("aten::"))
        _library.impl("copy_", functools.partial(_copy, _original("copy_")), "CUDA")


def _replace(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    returned = operator._schema.returns
    if name in _ALLOCATIONS:
        _library.impl(name, functools.partial(_allocate, _original(name)), "CUDA")
        return
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    # Without a kernel for the CPU there is no stand-in: the runtime says which it was.
    has_stand_in = any(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    )
    if packet not in _OWN and not is_view and has_stand_in:
        _library.impl(name, functools.partial(_queue, operator), "CUDA")


def _original(name: str) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return functools.partial(kernel.call_boxed, keys)


# ---- a tensor without a tensor ----


@dataclass(frozen=True)
class _Address:
    """Elements on a device: enough to read and write them when the time comes."""

    pointer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Address:
        return cls(
            tensor.data_ptr(),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on_host(self) -> Tensor:
        if 0 in self.size:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")
        elements = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        memory = (ctypes.c_byte * (elements * self.dtype.itemsize)).from_address(self.pointer)
        flat = torch.frombuffer(memory, dtype=self.dtype)
        tensor = flat.as_strided(self.size, self.stride)
        tensor = torch._C._nn._conj(tensor) if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """Over an operator's arguments or results, and the lists of them."""
    if isinstance(x, (list, tuple)):
        return [_map(function, one) for one in x] if isinstance(x, list) else tuple(_map(function, one) for one in x)
    if type(x) is dict:
        return {key: _map(function, one) for key, one in x.items()}
    return function(x)


def _is_cuda(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


# ---- operators ----


def _queue(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel for CUDA of an operator."""
    tensors: list[Tensor] = []
    _map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
    device = _device_of(operator, tensors, kwargs)
    name = str(operator)
    outputs = _made(operator, args, kwargs, device)
    kwargs = {**kwargs, **_random(operator, kwargs, device)}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    frozen = _map(_freeze, (args, kwargs))
    if outputs is None:
        ran_at_once.add(name)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        _check(lib.synchronize(device.index, stream))
        return _given_back(operator, frozen, device)
    results = tuple(_Address.of(t) for t in outputs)

    def run() -> None:
        got = _call(operator, frozen)
        for address, value in zip(results, _new_ones(operator, got), strict=True) if results else ():
            address.on_host().copy_(value)

    _launch(device, name, run)
    return _returned(operator, args, kwargs, outputs)


def _device_of(operator: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]))
    others = [t for t in tensors if t.device.type == "cpu" and t.dim() > 0]
    if len(devices) > 1 or (others and operator.overloadpacket.__name__ not in _MIXED):
        found = sorted({str(t.device) for t in tensors})
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {operator}")
    device = devices.pop() if devices else torch.device("cuda", torch.cuda.current_device())
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _made(operator: Any, args: tuple, kwargs: dict[str, Any], device: torch.device) -> list[Tensor] | None:
    """New tensors for what the operator returns, and its `out` tensors resized; None where no one knows the shapes."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def on_meta(x: object) -> object:
        if not isinstance(x, Tensor) or (x.device.type == "cpu" and x.dim() == 0):
            return x
        shape = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        pairs.append((x, shape))
        return shape

    returned = operator._schema.returns
    all_written = all(r.alias_info is not None for r in returned)
    kwargs = {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items() if k != "generator"}
    try:
        shapes = operator(*_map(on_meta, args), **_map(on_meta, kwargs))
    except NotImplementedError:
        return [] if all_written else None
    for given, shape in pairs:
        if given.shape != shape.shape:
            given.resize_(shape.shape).as_strided_(shape.size(), shape.stride())
    if all_written:
        return []
    if not all(isinstance(s, (Tensor, list, tuple)) for s in _as_tuple(shapes)):
        return None
    outputs: list[Tensor] = []
    for r, shape in zip(returned, _as_tuple(shapes) if len(returned) > 1 else (shapes,), strict=True):
        outputs += [
            torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=device)
            for one in (_as_tuple(shape) if r.alias_info is None else ())
        ]
    return outputs


def _freeze(x: object) -> object:
    """What a launch takes along: addresses of tensors on a device, the values of those on the host."""
    if _is_cuda(x):
        return _Address.of(x)
    return x.clone() if isinstance(x, Tensor) else x


def _call(operator: Any, frozen: tuple[tuple, dict[str, Any]]) -> Any:
    args, kwargs = _map(lambda x: x.on_host() if isinstance(x, _Address) else x, frozen)
    return operator(*args, **kwargs)


def _new_ones(operator: Any, got: Any) -> list[Tensor]:
    """Of what an operator returned, the tensors that it made."""
    returned = operator._schema.returns
    each = zip(returned, _as_tuple(got) if len(returned) > 1 else (got,), strict=True)
    return [one for r, value in each if r.alias_info is None for one in _as_tuple(value)]


def _given_back(operator: Any, frozen: tuple[tuple, dict[str, Any]], device: torch.device) -> Any:
    """Of an operator that runs at once: its results, on the device."""
    with _as_on_a_device():
        result = _call(operator, frozen)
    kept: list[Tensor] = []

    def up(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        to, kept_value = _Address.of(made), value
        kept.append(made)
        _launch(device, f"result of {operator}", lambda: to.on_host().copy_(kept_value))
        return made

    return _map(up, result)


def _returned(operator: Any, args: tuple, kwargs: dict[str, Any], outputs: list[Tensor]) -> Any:
    """What was written is given back itself, what is new as it was made."""
    schema, made, given = operator._schema, iter(outputs), []
    for returned in schema.returns:
        if returned.alias_info is not None:
            given.append(_argument_of(schema, returned.alias_info, args, kwargs))
        elif str(returned.type) == "Tensor":
            given.append(next(made))
        else:
            given.append(list(made))
    return None if not given else given[0] if len(given) == 1 else tuple(given)


def _argument_of(schema: Any, alias: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return kwargs[argument.name] if argument.name in kwargs else args[i]
    raise AssertionError(f"{schema} returns what it does not take")


def _random(operator: Any, kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A generator for the CPU that stands where the device's stands, and moves that on."""
    names = [a.name for a in operator._schema.arguments]
    if "generator" not in names:
        return {}
    torch.cuda.init()
    of_device = kwargs.get("generator") or torch.cuda.default_generators[device.index]
    offset = of_device.get_offset()
    of_device.set_offset(offset + 4)
    return {"generator": torch.Generator().manual_seed((of_device.initial_seed() * 1_000_003 + offset) % (1 << 63))}


def _as_tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, (list, tuple)) else (x,)


# ---- copies and allocations ----


def _copy(original: Callable[..., Any], to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies of bytes are the runtime's; one that converts or rearranges on one device is a kernel."""
    plain = to.dtype is source.dtype and to.is_contiguous() and source.is_contiguous()
    plain = plain and to.shape == source.shape and to.is_neg() == source.is_neg() and to.is_conj() == source.is_conj()
    if to.device != source.device or plain:
        original(to, source, non_blocking)
        return to
    source = source.expand(to.shape)
    addresses = _Address.of(to), _Address.of(source)
    _launch(to.device, "aten::copy_", lambda: addresses[0].on_host().copy_(addresses[1].on_host()))
    return to


def _allocate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """New memory holds whatever was there, and earlier work on its stream may still write to it."""
    made = original(*args, **kwargs)
    nbytes = made.untyped_storage().nbytes()
    if nbytes:
        pointer = made.untyped_storage().data_ptr()
        _check(lib.poison(made.device.index, torch._C._cuda_getCurrentRawStream(made.device.index), pointer, nbytes))
    return made


# ---- launches ----


def _launch(device: torch.device, name: str, run: Callable[[], None]) -> None:
    number, stream = next(_numbers), torch._C._cuda_getCurrentRawStream(device.index)
    _queued[number] = run
    if torch.cuda.is_current_stream_capturing():
        _captured.add(number)
    _check(lib.launch_python(device.index, stream, name.encode(), number))


@ctypes.CFUNCTYPE(None, ctypes.c_uint64)
def _run(number: int) -> None:
    """Called by the runtime, on the thread of whoever waits, under its lock."""
    run = _queued[number] if number in _captured else _queued.pop(number)
    try:
        with _as_on_a_device():
            run()
    except BaseException as error:
        lib.report(f"a queued operation raised {type(error).__name__}: {error}".encode())


@contextlib.contextmanager
def _as_on_a_device() -> Iterator[None]:
    """No mode, guard or setting of the thread that waits reaches what runs on the device."""
    # The keys that autograd, autocast and modes put before a kernel.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        cached = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", False)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cpu", cached)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error: the runtime returned {code}")
