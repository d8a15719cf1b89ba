"""Masters joined of weights and remainders, against the split that makes them, decided with integers."""

import numpy as np
import torch
from statestream.convert.values import join


def split(patterns):
    """Weight and remainder patterns of FP32 patterns: rounded half up in magnitude, and the bits that are cut off."""
    wide = patterns.astype(np.uint64)
    return ((wide + 0x8000) // 0x10000).astype(np.uint16), (wide % 0x10000).astype(np.uint16)


def joined(weight, low):
    weights = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    return join(weights, torch.from_numpy(low.view(np.int16))).view(torch.int32).numpy().view(np.uint32)


def test_every_high_half_with_low_halves_of_every_kind_comes_back():
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    patterns = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lows).ravel()
    exponent, fraction = patterns >> 23 & 0xFF, patterns & 0x7FFFFF
    patterns = patterns[(exponent != 0xFF) | (fraction == 0)]  # numbers and infinities
    assert np.array_equal(joined(*split(patterns)), patterns)


def test_where_no_master_gave_the_pair_the_weight_counts_by_itself():
    weight = np.array([0x0000, 0x8000, 0x7F80, 0xFF80], dtype=np.uint16)
    low = np.array([0x8000, 0xFFFF, 0x0001, 0x7FFF], dtype=np.uint16)
    assert np.array_equal(joined(weight, low), weight.astype(np.uint32) << 16)


def test_strides_of_weight_and_remainder_may_differ():
    masters = torch.randn(6, 5)
    weight, low = split(masters.view(torch.int32).numpy().view(np.uint32))
    weights = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16)
    lows = torch.from_numpy(low.view(np.int16))
    assert torch.equal(join(weights.t().contiguous().t(), lows), masters)
