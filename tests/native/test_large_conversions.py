"""Conversions of many elements, whose results go past the caches: the bits of the same elements in small parts, which
other tests judge, and nothing beside them written."""

from __future__ import annotations

import pytest
import torch
from statestream import kernels

from native.kernel_runner import BF16, F16, F32, U8

N = (1 << 20) + 256 + 77
PART = 1 << 16
GUARD = 8
FORMATS = [(F32, False), (BF16, False), (F16, False), (F16, True), (U8, False), (U8, True)]


def guarded(dtype: torch.dtype, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of sevens, and N elements in its middle, `offset` elements from where a cache's line begins."""
    whole = torch.full((N + 64 + 2 * GUARD,), 7, dtype=dtype)
    first = next(i for i in range(GUARD, GUARD + 64) if whole[i:].data_ptr() % 64 == 0) + offset
    return whole, whole[first : first + N]


def intact(whole: torch.Tensor, part: torch.Tensor) -> bool:
    begin = part.storage_offset()
    return bool((whole[:begin] == 7).all() and (whole[begin + N :] == 7).all())


def scales(dtype: torch.dtype) -> torch.Tensor | None:
    return torch.ones(-(-N // 256)) if dtype in (F16, U8) else None


def part_of(scale: torch.Tensor | None, first: int) -> torch.Tensor | None:
    return None if scale is None else scale[first // 256 : -(-min(first + PART, N) // 256)]


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("dtype", "root"), FORMATS, ids=str)
def test_many_elements_convert_as_few_do(dtype, root, offset, threads, monkeypatch):
    monkeypatch.setenv("STATESTREAM_NUM_THREADS", threads)
    values = torch.randn(N, generator=torch.Generator().manual_seed(1)) * 10
    values = values.square() if root else values
    where = {"root": root} if root else {}

    whole, state = guarded(dtype, offset)
    scale, expected_scale = scales(dtype), scales(dtype)
    expected = torch.zeros(N, dtype=dtype)
    kernels.encode(values, state, scale=scale, **where)
    for first in range(0, N, PART):
        part = slice(first, first + PART)
        kernels.encode(values[part], expected[part], scale=part_of(expected_scale, first), **where)
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]
    assert torch.equal(state.view(integer), expected.view(integer))
    assert scale is None or torch.equal(scale, expected_scale)
    assert intact(whole, state)

    whole, out = guarded(F32, offset)
    expected_out = torch.zeros(N)
    kernels.decode(state, out, scale=scale, **where)
    for first in range(0, N, PART):
        part = slice(first, first + PART)
        kernels.decode(expected[part], expected_out[part], scale=part_of(scale, first), **where)
    assert torch.equal(out.view(torch.int32), expected_out.view(torch.int32))
    assert intact(whole, out)
