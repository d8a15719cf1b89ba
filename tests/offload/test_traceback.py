"""What an error of a step leaves in its traceback can be printed: pytest and error trackers do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from statestream import CPUOffloadOptimizer, FusedAdam

param = torch.nn.Parameter(torch.ones(5_000_000))
param.grad = torch.ones_like(param)
optimizer = CPUOffloadOptimizer(FusedAdam([param]), 1 << 26)


def fail(*arguments):
    raise ArithmeticError("told to fail")


optimizer.strategy.device.launch = fail
try:
    optimizer.step()
except ArithmeticError as error:
    trace = error.__traceback__
    while trace:
        for value in list(trace.tb_frame.f_locals.values()):
            repr(value)
        trace = trace.tb_next
print("printed")
"""


def test_locals_of_a_failed_steps_frames_can_be_printed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "printed\n", (done.returncode, done.stderr)
