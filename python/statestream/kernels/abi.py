"""What a row of a kernel call needs beside addresses: block scales, and where its elements are in the whole tensor.

A state in a scaled format (statestream.formats) has a float32 scale for each block of 256
elements of its local tensor in memory order, the last block perhaps short. Rounding by random bits hangs on an
element's index in the whole tensor (csrc/random_bits.h), so that shards and cuts give the bits of the whole.
"""

from __future__ import annotations

from torch import Tensor, float32

from statestream.formats import SCALE_BLOCK, scale_count
from statestream.tensors.global_index import WHOLE, IndexMap
from statestream.tensors.local import is_fake

__all__ = ["extras_row", "scale_address"]


def scale_address(name: str, scale: Tensor, first: int, numel: int) -> int:
    """The address of the scale of elements [first, first + numel) of the tensor whose scales these are.

    ValueError unless the range is whole blocks and `scale` is float32, contiguous and long enough.
    """
    if scale.dtype is not float32 or not scale.is_contiguous():
        raise ValueError(
            f"{name}: found {scale.dtype} of shape {tuple(scale.shape)} and strides {scale.stride()}; "
            "expected contiguous torch.float32, one for each block of 256 elements"
        )
    if first < 0 or first % SCALE_BLOCK:
        raise ValueError(f"{name}: element {first} starts no block of {SCALE_BLOCK}; cut at a multiple of it")
    end, held = first + numel, scale.numel()
    if scale_count(end) > held:
        raise ValueError(f"{name}: {held} scales are of {held * SCALE_BLOCK} elements; found {end}")
    if end % SCALE_BLOCK and scale_count(end) < held:
        raise ValueError(f"{name}: element {end} ends no block of {SCALE_BLOCK}; cut at a multiple of it")
    return 0 if is_fake(scale) else scale.data_ptr() + first // SCALE_BLOCK * scale.element_size()


def extras_row(
    numel: int,
    *,
    ordinal: int,
    first: int = 0,
    index_map: IndexMap = WHOLE,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    master_scale: Tensor | None = None,
) -> tuple[int, ...]:
    """The extras of a row of `numel` elements, which is element `first` on of its local tensor.

    `ordinal` tells the parameter from all others, on every rank the same. The scales are the whole local
    tensor's; None where the format has none.
    """
    scales = {"exp_avg_scale": exp_avg_scale, "exp_avg_sq_scale": exp_avg_sq_scale, "master_scale": master_scale}
    addresses = (0 if s is None else scale_address(name, s, first, numel) for name, s in scales.items())
    return (*addresses, ordinal, first, *index_map, 0)
