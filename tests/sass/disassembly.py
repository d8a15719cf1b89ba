"""What nvcc made of the kernels, in numbers: registers, spills, wide accesses and instructions an element."""

from __future__ import annotations

import ast
import hashlib
import heapq
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

__all__ = ["ARCHS", "Kernel", "find", "kernels", "kernels_of"]

ROOT = Path(__file__).resolve().parents[2]
ARCHS = (80, 90, 100, 120)
ELEMENTS = 8
"""Elements of a thread in one round of the vector loop."""


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture."""

    name: str
    """Demangled and without namespaces, as adam_kernel<PlainWeight<BFloat16>, BFloat16, BFloat16, BFloat16>."""
    arch: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    """Stored and loaded."""
    wide_loads: int
    """128-bit accesses of global memory on the vector loop's path, as the two below; 0 without such a loop, and
    where the path depends on the formats: tests/ptx counts those kernels' instructions as they run."""
    wide_stores: int
    narrow_accesses: int
    instructions_per_element: float


def find(tool: str) -> str | None:
    """nvcc or nvdisasm: in CUDA_HOME, on PATH, in NVIDIA's wheels or inside triton's."""
    places = [Path(os.environ["CUDA_HOME"]) / "bin"] if os.environ.get("CUDA_HOME") else []
    places += [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        places += [*sorted(Path(site).glob("nvidia/cu*/bin"), reverse=True), Path(site) / "triton/backends/nvidia/bin"]
    return next((str(p / tool) for p in places if os.access(p / tool, os.X_OK)), None)


@cache
def kernels(arch: int) -> list[Kernel]:
    """Every kernel of csrc/cuda for one architecture, compiled with the flags of the wheel."""
    sources = [ROOT / "csrc" / "cuda" / name for name in ("adam.cu", "convert.cu", "generic.cu")]
    _wheel_flags()  # once, here: Python 3.11's parser fails now and then in two threads at a time
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [kernel for found in pool.map(lambda source: kernels_of(source, arch), sources) for kernel in found]


def kernels_of(source: Path, arch: int) -> list[Kernel]:
    """The kernels of one .cu file."""
    report, sass = _compiled(source, arch)
    codes = _functions(sass)
    usage = re.findall(
        r"Compiling entry function '(\w+)'.*?\n.*?\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*?Used (\d+) registers",
        report,
    )
    assert {name for name, *_ in usage} == set(codes), "ptxas and nvdisasm name other kernels"
    made = []
    for name, stack, stores, loads, registers in usage:
        path = [] if "generic" in name else _vector_path(codes[name])
        accesses = [text for text in path if re.search(r"\b(LDG|STG|LD|ST)\.", text)]
        wide = [text for text in accesses if ".128" in text]
        made.append(
            Kernel(
                name=_readable(name),
                arch=arch,
                registers=int(registers),
                stack_bytes=int(stack),
                spill_bytes=int(stores) + int(loads),
                wide_loads=sum("LDG" in text for text in wide),
                wide_stores=sum("STG" in text for text in wide),
                narrow_accesses=len(accesses) - len(wide),
                instructions_per_element=len(path) / ELEMENTS,
            )
        )
    return made


def _compiled(source: Path, arch: int) -> tuple[str, str]:
    """What ptxas says, and the disassembly; both kept in the temporary folder until something changes."""
    flags = ["-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", *_wheel_flags()]
    digest = hashlib.sha256(repr([flags, _version("nvcc"), _version("nvdisasm")]).encode())
    for header in sorted([*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cuda/*.h"), *ROOT.glob("csrc/cuda/*.cuh"), source]):
        digest.update(header.name.encode() + header.read_bytes())
    kept = Path(tempfile.gettempdir()) / f"statestream-sass-{digest.hexdigest()[:20]}"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=tempfile.gettempdir()) as folder:
                made, cubin = Path(folder, "made"), Path(folder, "it.cubin")
                made.mkdir()
                report = _call([find("nvcc"), *flags, str(source), "-o", str(cubin)])
                (made / "report").write_text(report)
                (made / "sass").write_text(_call([find("nvdisasm"), "-c", str(cubin)]))
                made.rename(kept)
    return (kept / "report").read_text(), (kept / "sass").read_text()


@cache
def _wheel_flags() -> list[str]:
    """NVCC_EXACT of setup.py: the code of other flags would say nothing of what is shipped."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NVCC_EXACT":
            return ast.literal_eval(node.value)
    raise RuntimeError("setup.py has no NVCC_EXACT")


@cache
def _version(tool: str) -> str:
    return _call([find(tool), "--version"])


@cache
def _readable(name: str) -> str:
    plain = _call(["c++filt", name]).strip().replace("statestream::", "").replace("(anonymous namespace)::", "")
    return re.sub(r"^void |\(.*\)$", "", plain)


def _call(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout + done.stderr


def _functions(sass: str) -> dict[str, list[str]]:
    """By mangled name, the lines of code: labels as ".L_x_1:", instructions as nvdisasm writes them."""
    found: dict[str, list[str]] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if section := re.match(r"\s*\.section\s+(\S+?),", line):
            name = section[1]
            code = found.setdefault(name.removeprefix(".text."), []) if name.startswith(".text.") else []
        elif label := re.match(r"(\.L_x_\d+):", line):
            code.append(label[0])
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return found


def _vector_path(code: list[str]) -> list[str]:
    """The instructions of one round of the vector loop as ordinary numbers take it.

    That is the shortest way through the innermost loop around the kernel's 128-bit loads: slow paths of
    division and square root, and the rule for NaN, are longer than the way past them. Both sides of a
    predicated pair count. Empty where a kernel has no 128-bit load.
    """
    places = {text[:-1]: i for i, text in enumerate(code) if text.startswith(".L_x_")}
    loads = [i for i, text in enumerate(code) if "LDG" in text and ".128" in text]
    if not loads:
        return []
    backward = [
        (places[target], i)
        for i, text in enumerate(code)
        if (target := _branch(text)) and places[target] <= loads[0] and i > loads[-1]
    ]
    if not backward:
        raise ValueError("no one loop holds all 128-bit loads of a kernel")
    begin, end = min(backward, key=lambda loop: loop[1] - loop[0])

    distance, before = {begin: 0}, {}
    queue = [(0, begin)]
    while queue:
        length, i = heapq.heappop(queue)
        if i == end:
            break
        for k in _next(code, places, i):
            cost = length + (not code[i].startswith(".L_x_"))
            if begin <= k <= end and cost < distance.get(k, len(code)):
                distance[k], before[k] = cost, i
                heapq.heappush(queue, (cost, k))
    path = [end]
    while path[-1] != begin:
        path.append(before[path[-1]])
    return [code[i] for i in reversed(path) if not code[i].startswith(".L_x_")]


def _branch(text: str) -> str | None:
    found = re.search(r"\bBRA\b.*?(\.L_x_\d+)", text)
    return found[1] if found else None


def _next(code: list[str], places: dict[str, int], i: int) -> Iterable[int]:
    text = code[i]
    if target := _branch(text):
        yield places[target]
        if not text.startswith("@") and not re.search(r"BRA\S*\s+!?U?P\d", text):
            return
    elif re.search(r"\b(CALL|RET|EXIT)\b", text) and not text.startswith("@"):
        return
    yield i + 1
