"""The checksums that `statestream doctor` compares with are those of the written rule, not of these kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from statestream.doctor.self_test import (
    CASES,
    CHECKSUMS,
    COPIES,
    ELEMENTS,
    OPTIONS,
    STEPS,
    checksum,
    differing,
    numbers,
)

from native import storage_judge
from native.contract_judge import contract_step
from native.kernel_runner import ADAMW

RULE = replace(
    ADAMW,
    lr=OPTIONS["lr"],
    beta1=OPTIONS["betas"][0],
    beta2=OPTIONS["betas"][1],
    eps=OPTIONS["eps"],
    weight_decay=OPTIONS["weight_decay"],
)


def bfloat16_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Patterns of the nearest BF16 numbers (uint16), and their values as float32."""
    patterns = storage_judge.round_to_bfloat16(values.astype(np.float32).view(np.uint32))
    return patterns, (patterns.astype(np.uint32) << 16).view(np.float32)


def steps_by_the_rule(case: str) -> list[np.ndarray]:
    """Weight, exp_avg, exp_avg_sq and master as they are stored after the last step."""
    given = [numbers(seed).numpy() for seed in range(STEPS + 1)]
    stored = CASES[case]
    if stored.param is torch.bfloat16:
        given = [bfloat16_values(values)[1] for values in given]
    small = stored.arguments.get("exp_avg_dtype") == "bf16"
    weight, m, v = given[0], np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
    for t in range(1, STEPS + 1):
        rows = [contract_step(*x, RULE, t) for x in zip(weight, given[t], m, v, strict=True)]
        weight, m, v = np.array(rows, np.float32).T.copy()
        if small:
            (bits_m, m), (bits_v, v) = bfloat16_values(m), bfloat16_values(v)
    moments = [bits_m, bits_v] if small else [m, v]
    if stored.param is torch.float32:
        return [weight, *moments]
    if stored.arguments.get("store_param_remainders"):
        high, low = storage_judge.split(weight.view(np.uint32))
        return [high, *moments, low]
    return [bfloat16_values(weight)[0], *moments, weight]


@pytest.mark.parametrize("case", CASES)
def test_a_checksum_is_that_of_the_written_rule(case):
    results = [torch.from_numpy(np.tile(array, COPIES).view(np.uint8)) for array in steps_by_the_rule(case)]
    assert checksum(results) == CHECKSUMS[case]


def test_the_kernels_have_these_bits_with_every_instruction_set(isa):
    assert differing(torch.device("cpu")) == []


def test_the_numbers_are_of_many_magnitudes_and_exact_in_float32():
    values = numbers(1)
    assert values.dtype is torch.float32 and values.unique().numel() > 0.99 * ELEMENTS
    exponents = torch.frexp(values)[1]
    assert exponents.min() == -15 and exponents.max() == 4
    assert 0.4 < (values < 0).float().mean() < 0.6
