"""What saves and loads take of host memory, measured as resident bytes in a process of its own.

python host_memory.py FOLDER ELEMENTS_OF_A_PARAMETER PARAMETERS SAVES

Prints JSON: bytes of the export by the formula, the extra peak of resident bytes of each path, and how far resident
bytes grow from the fourth of so many saves to the last.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from helpers.memory import own_resident_bytes, peak_extra_bytes, settle
from statestream import FusedAdam
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Job:
    def __init__(self, folder: Path, elements: int, params: int):
        self.folder = folder
        weights = {f"w{i}": nn.Parameter(torch.ones(elements, dtype=torch.bfloat16)) for i in range(params)}
        self.model = nn.ParameterDict(weights)
        self.optimizer = FusedAdam(
            self.model.parameters(),
            master_weights=True,
            exp_avg_dtype="bf16",
            exp_avg_sq_dtype="bf16",
            state_dict_cpu_offload=True,
        )
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def export(self) -> dict[str, object]:
        return {"optim": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)}

    def save(self) -> None:
        dcp.save(self.export(), checkpoint_id=self.folder, no_dist=True)

    def async_save(self) -> None:
        # As a trainer would: the export is not kept once it is handed over.
        dcp.async_save(self.export(), checkpoint_id=self.folder).result()

    def load(self) -> None:
        state = self.export()
        dcp.load(state, checkpoint_id=self.folder, no_dist=True)
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=FLAT)


def main() -> None:
    folder, elements, params, saves = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # what is imported: it need not be looked through at each measurement
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    # Whatever is loaded or built once, by saves of a small job.
    small = Job(folder / "small", 1000, 2)
    for warm_up in (small.save, small.async_save, small.load):
        warm_up()
    job = Job(folder / "checkpoint", elements, params)
    found: dict[str, int] = {"export by formula": 12 * elements * params, "largest item": 4 * elements}
    for name, run in (
        ("state_dict", job.optimizer.state_dict),
        ("save", job.save),
        ("load", job.load),
        ("async_save", job.async_save),  # last: torch keeps its staged copy until the next
    ):
        found[name] = peak_extra_bytes(run)
    sizes = []
    for _ in range(saves // 2):
        job.async_save()
        job.save()  # by then the writer of the one before has let go of its copy
        settle()
        sizes.append(own_resident_bytes())
    found["grown"] = sizes[-1] - max(sizes[:2])
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
