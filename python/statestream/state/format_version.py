"""`format_version`, a setting of every group in a checkpoint: one number that says what the file holds.

torch.distributed.checkpoint (DCP) silently casts what it reads to the dtype of the tensor that it reads into. A load
then sees the dtypes of its own optimizer, not those of the file: remainders would become masters such as -9340. DCP
passes on the settings of a group as they were saved, but fails on a setting that either side lacks. So no setting is
added, and this one tells.

    number = 100 * version + 10 * dtypes + masters

| digit | value | meaning |
|---|---|---|
| version | 2 | |
| dtypes | 0 | each number is exported as float32, remainders as integers |
| masters | 0 | none |
| | 1 | FP32 values |
| | 2 | the lower 16 bits of FP32 values, as int16, beside bfloat16 parameters |
| | 3 | of bfloat16 parameters as 2, of all others as 1 |

All groups carry the number of the whole optimizer. DCP's flat form passes on one number where groups were joined, and a
group, or a stage of a pipeline, may have no parameter that needs a master. 4 is left for 8-bit remainders, other values
of `dtypes` for exports of fewer bytes. Older files have the number 1, which does not say what they hold.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from statestream.tensors.validate import count_of

__all__ = ["SAYS_NOTHING", "Masters", "check_held", "masters_in", "number_of"]

_VERSION = 2
_FLOAT32 = 0
SAYS_NOTHING = 1
"""The number of files from before it had a meaning."""


class Masters(IntEnum):
    """What the entries named master_param are."""

    NONE = 0
    FP32 = 1
    REMAINDERS = 2
    BOTH = 3

    def dtype(self, param: torch.dtype | None) -> torch.dtype | None:
        """The dtype that they were saved in beside a parameter of dtype `param`; None: there are none."""
        if self is Masters.NONE:
            return None
        of_bfloat16 = param is torch.bfloat16
        return torch.int16 if self is Masters.REMAINDERS or (self is Masters.BOTH and of_bfloat16) else torch.float32


def number_of(masters: Masters) -> int:
    return 100 * _VERSION + 10 * _FLOAT32 + masters


def masters_in(number: Any, group: str) -> Masters | None:
    """What a checkpoint with that number holds; None where it does not say. ValueError for the number of a later
    version."""
    if number is None:
        return None
    value = count_of(number, f"format_version of {group}")
    if value == SAYS_NOTHING:
        return None
    if not number_of(Masters.NONE) <= value <= number_of(Masters.BOTH):
        raise ValueError(
            f"{group}: the checkpoint has format_version {int(value)}, this statestream reads "
            f"{SAYS_NOTHING} and {number_of(Masters.NONE):d} to {number_of(Masters.BOTH):d}; update statestream"
        )
    return Masters(int(value) - number_of(Masters.NONE))


def check_held(held: Masters | None, found: torch.dtype, param: torch.dtype | None, what: str) -> None:
    """ValueError where masters of dtype `found` are not what the checkpoint held: DCP has cast them since, or has left
    what was there before."""
    if held is None:
        return
    saved = held.dtype(param)
    if saved is None:
        raise ValueError(
            f"{what}: the checkpoint holds no masters, these are of the optimizer that it was read into; use "
            "master_weights=False, or make masters of the weights: statestream convert SOURCE TARGET --to statestream "
            "--masters float32"
        )
    if (saved is torch.int16) == (found is torch.int16):
        return
    if saved is torch.int16:
        raise ValueError(
            f"{what}: the checkpoint holds 16-bit remainders, read as {found} they are no masters; build the optimizer "
            "with store_param_remainders=True, or convert the checkpoint: statestream convert SOURCE TARGET --to "
            "statestream --masters float32"
        )
    raise ValueError(
        f"{what}: the checkpoint holds FP32 masters, read as {found} their values are lost; build the optimizer with "
        "store_param_remainders=False"
    )
