"""A parameter of the kind that Transformer Engine makes: a tensor subclass without storage of its own, which holds
FP8 bytes and a scale.

It stands in for the real one where that is not installed. What it shares with it: `dequantize(dtype=)` and
`quantize_(values)`; a nominal dtype that is not that of the bytes; no torch functions, so that every operation
arrives at dispatch; operations that are not its own see plain values, in place ones write them back; `detach`,
`view` and `empty_like` stay quantised and ignore a dtype; a copy into it quantises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Float8", "quantized_parameter"]

aten = torch.ops.aten
MAX_E4M3 = 448.0


class Float8(Tensor):
    """E4M3 bytes and one FP32 scale, chosen from the largest value whenever it is written."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype, requires_grad: bool = False) -> Float8:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=dtype, device=data.device, requires_grad=requires_grad
        )

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype, requires_grad: bool = False):
        self.bytes, self.scale = data, scale

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype = torch.bfloat16) -> Float8:
        data = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
        return cls(data, torch.ones(1, device=values.device), dtype).quantize_(values)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        return (self.bytes.float() * self.scale).to(dtype or self.dtype)

    def quantize_(self, values: Tensor) -> Float8:
        values = values.detach().float()
        self.scale.copy_((values.abs().max() / MAX_E4M3).clamp(min=1e-30).view(1))
        self.bytes.copy_(values / self.scale)
        return self

    def detach(self) -> Float8:
        return Float8(self.bytes, self.scale, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Float8({self.dequantize()})"

    def __reduce_ex__(self, protocol: int) -> Any:
        return _restored, (self.bytes.view(torch.uint8), self.scale, self.dtype, self.requires_grad)

    def __deepcopy__(self, memo: dict) -> Float8:
        if id(self) not in memo:
            memo[id(self)] = _restored(self.bytes.clone(), self.scale.clone(), self.dtype, self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple, kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return args[0].detach()
        if func is aten.empty_like.default:
            like = args[0]
            return cls(torch.empty_like(like.bytes), torch.ones_like(like.scale), like.dtype)
        if func is aten.view.default:
            return cls(func(args[0].bytes, args[1]), args[0].scale, args[0].dtype)
        if func is aten.copy_.default and isinstance(args[0], cls):
            source = args[1]
            if isinstance(source, cls):
                args[0].bytes.copy_(source.bytes)
                args[0].scale.copy_(source.scale)
            else:
                args[0].quantize_(source)
            return args[0]
        plain = tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs))
        out = func(*plain[0], **plain[1])
        if func._schema.is_mutable and isinstance(args[0], cls):
            return args[0].quantize_(plain[0][0])
        return out


def _restored(data: Tensor, scale: Tensor, dtype: torch.dtype, requires_grad: bool) -> Float8:
    return torch.nn.Parameter(Float8(data.view(torch.float8_e4m3fn), scale, dtype), requires_grad=requires_grad)


def quantized_parameter(values: Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(Float8.of(values, dtype))
