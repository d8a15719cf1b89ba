"""Builds statestream._cpu and, with nvcc, statestream._cuda. Needs a C++17 compiler and pybind11, no torch, no GPU.

STATESTREAM_CUDA=auto|0|1   build the CUDA module where nvcc is found (the default), never, or always
STATESTREAM_CUDA_ARCHS      GPU architectures, such as "80;90+PTX" (compute capability 9.0 and its PTX)
STATESTREAM_BUILD_JOBS      processes that compile at once; as many as there are processors by default

nvcc is the first of: CUDA_HOME/bin, PATH, the nvidia-cuda-nvcc wheels of this Python (with -crt, -cccl, -runtime
and nvidia-nvvm beside them).
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
CUDA_MODULE = "statestream._cuda"

# Nothing may fuse that the source does not fuse: the bits are a contract (csrc/adam_rule.h).
EXACT = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-Wall"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-Wno-maybe-uninitialized"]
ISA_FLAGS = {
    "isa_avx2": ["-mavx2", "-mfma"],
    "isa_avx512": AVX512,
    "isa_avx512bf16": [*AVX512, "-mavx512bf16"],
}
NVCC_EXACT = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]

# The PTX of the oldest serves every later GPU that has no code of its own here.
DEFAULT_ARCHS = "80+PTX;90;100;120"
OLDEST_NVCC = (12, 1)
"""Takes 32 KB of kernel parameters."""
OLDEST_ARCH = 80
"""Converts to BF16 in one instruction."""


def headers(*folders: Path) -> list[str]:
    return sorted(str(p) for folder in folders for p in folder.iterdir() if p.suffix in (".h", ".cuh"))


@cache
def cuda_wanted() -> str:
    wanted = os.environ.get("STATESTREAM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"STATESTREAM_CUDA={wanted!r}: use auto, 0 or 1")
    return wanted


@cache
def find_nvcc() -> str | None:
    candidates = [Path(home) / "bin/nvcc" for home in [os.environ.get("CUDA_HOME")] if home]
    candidates += [Path(found) for found in [shutil.which("nvcc")] if found]
    # An isolated build hides the environment's own packages from sys.path, but they are there.
    for site in dict.fromkeys([*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        candidates += sorted((Path(site) / "nvidia").glob("cu*/bin/nvcc"), reverse=True)
    return next((str(c.resolve()) for c in candidates if os.access(c, os.X_OK)), None)


class Toolkit:
    """What a nvcc can do, and the folder with its static runtime. RuntimeError where it will not do."""

    def __init__(self, nvcc: str):
        self.nvcc = nvcc
        text = self._ask("--version")
        release = re.search(r"release (\d+)\.(\d+)", text)
        if not release:
            raise RuntimeError(f"{nvcc} does not say its release")
        self.release = int(release[1]), int(release[2])
        self.build = text.strip().splitlines()[-1]
        if self.release < OLDEST_NVCC:
            raise RuntimeError(f"{nvcc} is of CUDA {release[1]}.{release[2]}; statestream needs 12.1 or later")
        self.archs = {int(a) for a in re.findall(r"sm_(\d+)\b", self._ask("--list-gpu-code"))}
        self.library_dir = self._library_dir()

    def _ask(self, *arguments: str) -> str:
        done = subprocess.run([self.nvcc, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.nvcc} {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout + done.stderr

    def _library_dir(self) -> str:
        # nvcc on PATH may be a script that calls another: only nvcc knows where its toolkit is.
        top = re.search(r"^#\$ TOP=\"?([^\"\n]+)", self._ask("--dryrun", "-x", "cu", "-c", os.devnull), re.M)
        root = Path(top[1].strip()) if top else Path(self.nvcc).parents[1]
        for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib", "targets/sbsa-linux/lib"):
            if (root / folder / "libcudart_static.a").exists():
                return str((root / folder).resolve())
        raise RuntimeError(f"{self.nvcc} has no libcudart_static.a beside it, under {root.resolve()}")

    def architectures(self) -> str:
        """What to build for: STATESTREAM_CUDA_ARCHS, or those of the default that this nvcc knows."""
        wanted = os.environ.get("STATESTREAM_CUDA_ARCHS")
        if wanted is None:
            known = [a for a in DEFAULT_ARCHS.split(";") if int(a.removesuffix("+PTX")) in self.archs]
            return ";".join(known)
        for arch in wanted.split(";"):
            if not re.fullmatch(r"\d{2,3}[af]?(\+PTX)?", arch) or int(re.match(r"\d+", arch)[0]) < OLDEST_ARCH:
                raise RuntimeError(
                    f'STATESTREAM_CUDA_ARCHS={wanted!r}: use compute capabilities from 80 on, such as "80;90+PTX"'
                )
        return wanted

    def flags(self) -> list[str]:
        flags = list(NVCC_EXACT)
        if self.release >= (13, 0):  # 12.8 has it too, and drivers that serve 12.1 to 12.3 do not load what it makes
            flags.append("--compress-mode=size")
        for arch in self.architectures().split(";"):
            number = arch.removesuffix("+PTX")
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if arch.endswith("+PTX"):
                flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        return flags


@cache
def find_toolkit() -> Toolkit | None:
    """The toolkit to build the CUDA module with; None where it is not wanted, or not there and not demanded."""
    if cuda_wanted() == "0":
        return None
    try:
        nvcc = find_nvcc()
        if not nvcc:
            raise RuntimeError("no nvcc in CUDA_HOME, on PATH or among the nvidia-cuda-nvcc wheels")
        toolkit = Toolkit(nvcc)
        toolkit.architectures()
        return toolkit
    except RuntimeError as error:
        if cuda_wanted() == "1":
            sys.exit(f"statestream: STATESTREAM_CUDA=1, but {error}")
        print(f"statestream: building for the CPU alone: {error}", file=sys.stderr)
        return None


class BuildExt(build_ext):
    """Compiles the CPU kernels once for each instruction set, and nvcc's files by nvcc."""

    def run(self):
        # Not before: an sdist or the metadata must not ask for nvcc.
        toolkit = find_toolkit()
        for ext in [ext for ext in self.extensions if ext.name == CUDA_MODULE]:
            if toolkit:
                self.link_with_runtime(ext, toolkit)
            else:
                self.extensions.remove(ext)
        super().run()

    def link_with_runtime(self, ext, toolkit: Toolkit):
        """Statically, and none of its symbols show: torch brings a runtime of its own."""
        ext.define_macros.append(("STATESTREAM_CUDA_ARCHS", f'"{toolkit.architectures()}"'))
        ext.library_dirs.append(toolkit.library_dir)
        ext.libraries += ["cudart_static", "rt", "pthread", "dl"]
        ext.extra_link_args.append("-Wl,--exclude-libs,ALL")

    def build_extensions(self):
        compile_one = self.compiler._compile

        def compile_with_isa_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            extra = ISA_FLAGS.get(Path(src).stem, []) if platform.machine() in ("x86_64", "AMD64") else []
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *extra], pp_opts)

        self.compiler._compile = compile_with_isa_flags
        super().build_extensions()

    def build_extension(self, ext):
        if ext.name == CUDA_MODULE:
            objects = [self.nvcc_object(source, ext) for source in sorted((CSRC / "cuda").glob("*.cu"))]
            ext.extra_objects = objects
            ext.depends = [*ext.depends, *objects]  # one newer than the module links it again
        super().build_extension(ext)

    def nvcc_object(self, source: Path, ext) -> str:
        """Compiles where the object is older than the source or a header, or was made by another command."""
        target = Path(self.build_temp) / "nvcc" / f"{source.stem}.o"
        made_by = target.with_suffix(".command")
        toolkit = find_toolkit()
        jobs = os.environ.get("STATESTREAM_BUILD_JOBS", "0")
        defines = [f"-D{name}={value}" for name, value in ext.define_macros if name == "STATESTREAM_CUDA_ARCHS"]
        command = [toolkit.nvcc, *toolkit.flags(), *defines, "-c", str(source), "-o", str(target)]
        recipe = "\n".join([toolkit.build, *command])
        inputs = [source, *(Path(p) for p in ext.depends if Path(p).suffix in (".h", ".cuh"))]
        current = (
            not self.force
            and target.exists()
            and made_by.exists()
            and made_by.read_text() == recipe
            and all(p.stat().st_mtime < target.stat().st_mtime for p in inputs)
        )
        if not current:
            target.parent.mkdir(parents=True, exist_ok=True)
            made_by.unlink(missing_ok=True)
            print(" ".join(command), flush=True)
            if subprocess.run([*command, "-t", jobs]).returncode:
                sys.exit(f"statestream: nvcc failed on {source}; STATESTREAM_CUDA=0 builds for the CPU alone")
            made_by.write_text(recipe)
        return str(target)


def cpu_extension() -> Pybind11Extension:
    sources = sorted(str(p) for p in (CSRC / "cpu").glob("*.cpp"))
    return Pybind11Extension(
        "statestream._cpu",
        sources,
        cxx_std=17,
        extra_compile_args=EXACT,
        extra_link_args=["-pthread"],
        depends=headers(CSRC, CSRC / "cpu"),
    )


def cuda_extension() -> Pybind11Extension:
    """As far as it is known before nvcc is looked for."""
    return Pybind11Extension(
        CUDA_MODULE,
        [str(CSRC / "cuda" / "module.cpp")],
        cxx_std=17,
        extra_compile_args=EXACT,
        depends=headers(CSRC, CSRC / "cuda"),
    )


ParallelCompile("STATESTREAM_BUILD_JOBS", default=0).install()
setup(ext_modules=[cpu_extension(), cuda_extension()], cmdclass={"build_ext": BuildExt})
