"""Random programs over FusedAdam and CPUOffloadOptimizer: bits, counters and settings are those of a plain model after
every operation. A failure prints the seed, what is left of its program, and the command that plays it again."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from native.contract_judge import rounded
from statestream import FusedAdam

from .arithmetic import fma
from .play import Failed, play, play_all, shrunk
from .program import OPERATIONS, Program

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")

SAMPLE = 100


@pytest.mark.parametrize("first", range(0, SAMPLE, 50))
def test_programs_end_as_the_model_says(first):
    play_all(range(first, first + 50))


@pytest.mark.long  # a quarter of an hour in all
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, 20_000, 1_000))
def test_twenty_thousand_programs(first):
    play_all(range(first, first + 1_000))


def test_the_sample_has_every_operation_and_every_form():
    programs = [Program(seed) for seed in range(SAMPLE)]
    assert {p.name(n) for p in programs for n in p.kept_operations} == set(OPERATIONS)
    forms = {(p.setup.form.exp_avg, p.setup.form.exp_avg_sq) for p in programs}
    assert len(forms) == 16
    assert {p.setup.form.master for p in programs} == {None, "fp32", "fp16", "remainders"}


def test_the_models_fma_rounds_once():
    values = np.random.default_rng(0)
    a, b, c = (np.float32(values.standard_normal(2000) * 2.0 ** values.integers(-40, 40, 2000)) for _ in range(3))
    # Sums a hair below the middle between two floats, of which rounding twice makes the middle, and the even float.
    odd = np.float32(1 + (2 * values.integers(0, 2**22, 500) + 1) * 2.0**-23)
    a, b = np.append(a, np.full(500, np.float32(2.0**-24 * (1 + 2.0**-20)))), np.append(b, np.full(500, 1 - 2.0**-20))
    a, b, c = np.float32(a), np.float32(b), np.append(c, odd)
    found = fma(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        assert rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) == Fraction(float(got))
    rounded_twice = np.float32(np.float64(a) * b + np.float64(c))
    assert (rounded_twice[2000:] != found[2000:]).all()


def test_a_failing_program_is_made_smaller_and_can_be_played_again(monkeypatch):
    """Under a fault that needs a save and a load, and nothing else."""
    whole = next(
        p
        for p in map(Program, range(1000))
        if {"save", "load"} <= {p.name(n) for n in p.kept_operations} and len(p.kept_operations) > 8
    )
    load_param = FusedAdam._load_param

    def wrong(optimizer, load, loader):
        load_param(optimizer, load, loader)
        if load.values:
            optimizer.state[load.param]["step"].add_(1)

    monkeypatch.setattr(FusedAdam, "_load_param", wrong)
    with pytest.raises(Failed, match=f"python -m tests.fuzz {whole.seed} --operations") as failed:
        play_all([whole.seed])
    left = shrunk(whole)
    assert len(left.kept_operations) <= 3 and len(left.kept_params) == 1
    assert str(left) in str(failed.value) and "step of" in str(failed.value)
    monkeypatch.undo()
    play(left)
