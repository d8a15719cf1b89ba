"""The offloaded optimizer gives the bits of the optimizer itself, however its state is cut."""

from __future__ import annotations

import warnings

import pytest
import torch
from statestream import CPUOffloadOptimizer

from .conftest import assert_same_training, make_params, params_of_odd_layouts, set_grads, train
from .makers import OPTIMIZERS

CHUNKS = {"smallest": 1, "one_matrix": 30_000, "middle": 60_000, "all": 1 << 30, "one_pass": None}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*need more than step_chunk_bytes")
        yield


def missing(step):
    return {0: (), 1: (1, 4), 2: (0,)}.get(step, ())


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_bit_equal(name, dtype, chunk):
    params, reference = make_params(dtype), make_params(dtype)
    plain = OPTIMIZERS[name](reference)
    offloaded = CPUOffloadOptimizer(OPTIMIZERS[name](params), CHUNKS[chunk])
    train(plain, reference, range(5), missing)
    train(offloaded, params, range(5), missing)
    assert_same_training(params, offloaded, reference, plain)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.startswith("fused_adam")])
def test_state_before_any_step_is_the_optimizers_own(name):
    params, reference = make_params("mixed"), make_params("mixed")
    offloaded = CPUOffloadOptimizer(OPTIMIZERS[name](params), 20_000)
    assert_same_training(params, offloaded, reference, OPTIMIZERS[name](reference))


@pytest.mark.parametrize("chunk", ["smallest", "middle", "one_pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_save_and_load_in_the_middle_is_bit_equal(name, dtype, chunk):
    params, reference = make_params(dtype), make_params(dtype)
    plain = OPTIMIZERS[name](reference)
    train(plain, reference, range(6), missing)
    first = CPUOffloadOptimizer(OPTIMIZERS[name](params), CHUNKS[chunk])
    train(first, params, range(3), missing)
    saved = first.state_dict()
    train(first, params, range(3, 4))  # a snapshot does not notice

    again = make_params(dtype)
    second = OPTIMIZERS[name](again)
    train(second, again, range(3), missing)
    loaded = CPUOffloadOptimizer(OPTIMIZERS[name](again), CHUNKS["middle"])
    loaded.load_state_dict(saved)
    train(loaded, again, range(3, 6), missing)
    assert_same_training(again, loaded, reference, plain)


@pytest.mark.parametrize("name", ["fused_adam_masters", "fused_adam_by_random_bits", "adamw", "sgd_momentum"])
def test_groups_with_settings_of_their_own(name):
    params, reference = make_params("mixed"), make_params("mixed")

    def groups(p):
        return [{"params": p[:2]}, {"params": p[2:5], "lr": 0.01}, {"params": p[5:], "weight_decay": 0.3}]

    plain = OPTIMIZERS[name](groups(reference))
    offloaded = CPUOffloadOptimizer(OPTIMIZERS[name](groups(params)), 20_000)
    for step in range(4):
        for optimizer in (plain, offloaded):
            optimizer.param_groups[1]["lr"] = 0.01 * (step + 1)
        train(plain, reference, [step])
        train(offloaded, params, [step])
    assert_same_training(params, offloaded, reference, plain)


@pytest.mark.parametrize(
    "name", ["fused_adam_masters", "fused_adam_fp16_masters", "fused_adam_by_random_bits", "adamw"]
)
def test_layouts_that_are_not_contiguous(name):
    mine, reference = params_of_odd_layouts(), params_of_odd_layouts()
    plain, offloaded = OPTIMIZERS[name](reference), CPUOffloadOptimizer(OPTIMIZERS[name](mine), 2_000)
    for step in range(3):
        for optimizer, ps in ((plain, reference), (offloaded, mine)):
            set_grads(ps, step)
            optimizer.step()
    assert_same_training(mine, offloaded, reference, plain)


def test_an_optimizer_that_has_stepped_before_is_taken_over():
    for name in ("fused_adam_masters", "fused_adam_fp8", "fused_adam_fp16_masters", "adamw", "sgd_momentum"):
        params, reference = make_params("mixed"), make_params("mixed")
        plain, inner = OPTIMIZERS[name](reference), OPTIMIZERS[name](params)
        train(plain, reference, range(4))
        train(inner, params, range(2))
        offloaded = CPUOffloadOptimizer(inner, 20_000)
        train(offloaded, params, range(2, 4))
        assert_same_training(params, offloaded, reference, plain)


@pytest.mark.parametrize("name", ["fused_adam_masters", "fused_adam_fp16_masters"])
def test_weights_loaded_later_are_where_the_next_step_starts(name):
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    plain, offloaded = OPTIMIZERS[name](reference), None
    offloaded = CPUOffloadOptimizer(OPTIMIZERS[name](params), 3_000)
    for optimizer, ps in ((plain, reference), (offloaded, params)):
        train(optimizer, ps, range(2))
        with torch.no_grad():
            for p, new in zip(ps, make_params(torch.bfloat16, seed=9), strict=True):
                p.copy_(new)
        train(optimizer, ps, range(2, 4))
    assert_same_training(params, offloaded, reference, plain)
    for p in params:
        p.data.copy_(torch.ones_like(p))
    for p in reference:
        p.data.copy_(torch.ones_like(p))
    offloaded.refresh_masters()
    plain.refresh_masters()
    train(plain, reference, [4])
    train(offloaded, params, [4])
    assert_same_training(params, offloaded, reference, plain)
