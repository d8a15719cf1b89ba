"""python interrupt_worker.py KIND ROUNDS: trains and exports until Ctrl-C, as often as told.

Who starts it sends SIGINT once after each line "ready", at a moment of his own. Each time the run must stand where an
undisturbed one stands after as many steps, or after one more where the interrupt came when that was done but not
counted; from there it goes on.
"""

from __future__ import annotations

import signal
import sys

import torch
from helpers.bits import differences, snapshot
from helpers.training import gradient

from step.test_interrupts import OPTIMIZERS


def train(optimizer: torch.optim.Optimizer, step: int) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        param.grad = gradient(param, index, step % 50)
    optimizer.step()


def main(kind: str, rounds: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run, undisturbed = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    undisturbed.state_dict()  # makes state that is made when it is first asked for
    counted = followed = 0
    for number in range(rounds):
        try:
            print("ready", flush=True)
            while True:
                run.state_dict()
                train(run, counted)
                counted += 1
        except KeyboardInterrupt:
            pass
        for _ in range(followed, counted):
            train(undisturbed, followed)
            followed += 1
        different = differences(snapshot(run), snapshot(undisturbed))
        if different:
            train(undisturbed, followed)
            followed = counted = followed + 1
            later = differences(snapshot(run), snapshot(undisturbed))
            if later:
                raise SystemExit(
                    f"interrupt {number}: neither {counted - 1} steps ({different}) nor {counted} ({later})"
                )
    print(f"done {counted}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
