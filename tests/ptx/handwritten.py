"""Small kernels for the tests of the interpreter itself."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np

from .execute import launch
from .memory import Memory
from .parse import Kernel, parse

__all__ = ["apply", "kernel_of", "run"]

_MODULE = """
.version 9.0
.target sm_{target}
.address_size 64
.visible .entry hand({params})
{{
    .reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<16>; .reg .f32 %f<16>; .reg .b64 %d<16>; .reg .f64 %g<8>;
    {body}
}}
"""


def kernel_of(body: str, params: int = 1, target: int = 90) -> Kernel:
    """A kernel of 64-bit parameters a0, a1, ...; registers %p %h(16) %r(32) %f %d(64) %g(f64)."""
    declared = ", ".join(f".param .u64 a{k}" for k in range(params))
    return parse(_MODULE.format(target=target, params=declared, body=body))["hand"]


def run(body: str, *arrays: np.ndarray, threads: int = 32, grid: int = 1, order=None, target: int = 90) -> Counter:
    """Runs the body with the arrays' addresses as its parameters; it may touch nothing else."""
    memory = Memory()
    bases = [memory.add(array, f"array {k}", writable=array.flags.writeable) for k, array in enumerate(arrays)]
    params = struct.pack(f"<{len(bases)}Q", *bases)
    kernel = kernel_of(body, len(arrays), target)
    return launch(kernel, grid=grid, block=threads, params=params, memory=memory, order=order)


def apply(instruction: str, dtypes: str, *inputs: np.ndarray, target: int = 90) -> np.ndarray:
    """One instruction over whole arrays.

    `instruction` names its operands $0 (the result), $1, ...; `dtypes` are numpy's names for all of
    them, the result's first; they are kept in registers of their own size.
    """
    names = dtypes.split()
    files = {2: "%h", 4: "%r", 8: "%d"}
    count = len(inputs[0])
    body = ["mov.u32 %r15, %tid.x;"]
    for k, name in enumerate(names):
        size = np.dtype(name).itemsize
        body.append(f"ld.param.u64 %d15, [a{k}]; mad.wide.u32 %d1{k}, %r15, {size}, %d15;")
        if k:
            body.append(f"ld.global.b{8 * size} {files[size]}{k}, [%d1{k}];")
        instruction = instruction.replace(f"${k}", f"{files[size]}{k}")
    size = np.dtype(names[0]).itemsize
    body.append(f"{instruction}; st.global.b{8 * size} [%d10], {files[size]}0; ret;")
    result = np.zeros(count, names[0])
    arrays = [np.ascontiguousarray(a, dtype=n) for a, n in zip(inputs, names[1:], strict=True)]
    run("\n".join(body), result, *arrays, threads=count, target=target)
    return result
