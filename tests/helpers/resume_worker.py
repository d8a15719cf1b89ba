"""Goes on with saved runs in a process of its own: ``python -m helpers.resume_worker FOLDER FIRST LAST``.

FOLDER holds ``MODE_NUMBER.pt``, each {"params": [...], "optimizer": state dict}; the snapshot after the
steps FIRST..LAST-1 is written beside it as ``MODE_NUMBER.out``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from helpers.bits import snapshot
from helpers.modes import MODES
from helpers.training import build, train


def main(folder: str, first: str, last: str) -> None:
    for file in sorted(Path(folder).glob("*.pt")):
        saved = torch.load(file, weights_only=True)
        optimizer = build(MODES[int(file.stem)], seed=99)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        with torch.no_grad():
            for param, value in zip(params, saved["params"], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        train(optimizer, range(int(first), int(last)))
        torch.save(snapshot(optimizer), file.with_suffix(".out"))


if __name__ == "__main__":
    main(*sys.argv[1:])
