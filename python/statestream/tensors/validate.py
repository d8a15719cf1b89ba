"""Values out of a state dict, which may come from anywhere: each is looked at before any is used, and none of them gets
to run code of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from statestream.tensors.local import is_fake, local_of

__all__ = [
    "FLOATS",
    "MOST_STEPS",
    "check_has_data",
    "count_of",
    "named_in_errors",
    "plain_tensor",
    "readable",
    "shown",
]

FLOATS = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""What numbers may be saved as: each of them is converted by torch, which does not convert every dtype that it has."""

MOST_STEPS = 2**30
"""Counts from here on are no counts: the random bits of an update know 30 bits of it, and a float32 stops at 2^24."""


@contextmanager
def named_in_errors(place: str) -> Iterator[None]:
    """Whatever goes wrong in a look at a value is a ValueError that names the place."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ValueError, RuntimeError)) and place in str(error):
            raise
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error


def plain_tensor(value: Any, what: str) -> Tensor:
    """`value` itself, or seen as a plain tensor where its class would be asked about every use of it. ValueError for
    what is no tensor of numbers in memory, or a DTensor of them."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{what}: expected a tensor, found {type(value).__name__}")
    cls = type(value)
    if cls.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # torch's own are DTensors, fake tensors, results of collectives.
        if not cls.__module__.startswith("torch."):
            raise ValueError(f"{what}: a tensor of class {cls.__name__} has no plain values; give a plain tensor")
    elif cls not in (Tensor, torch.nn.Parameter):
        with torch._C.DisableTorchFunctionSubclass():
            value = Tensor.as_subclass(value, Tensor)
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise ValueError(f"{what}: layout {layout} cannot be read")
    return value


def check_has_data(local: Tensor, what: str) -> None:
    """ValueError where the (local) tensor's memory does not reach to its last element: it was freed, or cut off."""
    if local.numel() == 0 or is_fake(local):
        return
    last = local.storage_offset() + sum((n - 1) * stride for n, stride in zip(local.shape, local.stride(), strict=True))
    held = local.untyped_storage().nbytes()
    if (last + 1) * local.element_size() > held:
        raise ValueError(
            f"{what}: {(last + 1) * local.element_size()} bytes are wanted for shape {tuple(local.shape)}, its memory "
            f"has {held}"
        )


def readable(value: Any, what: str) -> Tensor:
    """`value` as a plain tensor that can be read to its end."""
    value = plain_tensor(value, what)
    check_has_data(local_of(value), what)
    return value


def count_of(value: Any, what: str, live: Any = None) -> float:
    """A step count out of any of the forms it is saved in: int, float, tensor of one element. Where neither it nor the
    `live` tensor that it is for has data, there is nothing to read, and it is 0."""
    number, cause = math.nan, None
    if isinstance(value, Tensor):
        value = readable(value, what)
    try:
        if isinstance(value, Tensor):
            local = local_of(value)
            if isinstance(live, Tensor) and is_fake(local) and is_fake(live):
                return 0.0
            number = float(local.item()) if value.numel() == 1 else math.nan
        elif not isinstance(value, (str, bytes, bytearray)):
            number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        cause = error
    if not 0 <= number < MOST_STEPS or number != math.floor(number):
        try:
            raise ValueError(f"{what}: {shown(value)} is not a count of steps") from cause
        finally:
            del cause  # its traceback holds this frame, which would hold it
    return number


def shown(value: Any) -> str:
    """What an error shows of a value."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
