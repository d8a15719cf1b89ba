"""README's table of bytes a parameter, against the state that FusedAdam holds."""

from __future__ import annotations

import re

import pytest
import torch
from statestream import FusedAdam

from .pages import text_of

ELEMENTS = 256 * 100
COLUMNS = {
    "FP32 weights": (torch.float32, {}),
    "BF16 or FP16 weights": (torch.bfloat16, {}),
    "with FP32 masters": (torch.bfloat16, {"master_weights": True}),
    "with FP16 masters": (torch.bfloat16, {"master_weights": True, "master_weight_dtype": "fp16"}),
    "with remainders (BF16)": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
}


def rows() -> tuple[list[str], list[list[str]]]:
    section = text_of("README.md").split("## Bytes of state a parameter")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return lines[0], lines[2:]


HEADER, ROWS = rows()


def test_every_column_is_known_and_no_row_is_missing():
    assert ["moments", *COLUMNS] == HEADER
    assert len(ROWS) == 5


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_parameter_takes_as_many_bytes_as_the_table_says(row, column):
    dtype, arguments = COLUMNS[column]
    moments = dict(re.findall(r'(exp_avg(?:_sq)?_dtype)="(\w+)"', row[0]))
    assert len(moments) == 2 or row[0] == "FP32"
    param = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=dtype))
    optimizer = FusedAdam([param], **moments, **arguments)
    payloads = sum(v.numel() * v.element_size() for name, v in optimizer.state[param].items() if name != "step")
    assert payloads == int(row[1 + list(COLUMNS).index(column)]) * ELEMENTS
    scaled = sum(v.dtype in (torch.float16, torch.uint8) for v in optimizer.state[param].values())
    held = sum(optimizer.memory_report().host.values()) - param.numel() * param.element_size() - 4
    assert held == payloads + scaled * ELEMENTS / 64  # "1/64 of a byte more"
