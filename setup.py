"""Builds statestream._cpu. Needs a C++17 compiler and pybind11; neither torch nor a GPU.

STATESTREAM_CUDA=auto|0|1 says whether to build the CUDA module too: where nvcc is found, never, or always.
"""

import platform
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
HEADERS = sorted(str(p) for p in CSRC.rglob("*.h"))

# Nothing may fuse that the source does not fuse: the bits are a contract (csrc/adam_rule.h).
EXACT = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-Wall"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-Wno-maybe-uninitialized"]
FORM_FLAGS = {
    "form_avx2": ["-mavx2", "-mfma"],
    "form_avx512": AVX512,
    "form_avx512bf16": [*AVX512, "-mavx512bf16"],
}


class BuildExt(build_ext):
    """Gives each form of the CPU kernel its own instruction set."""

    def build_extensions(self):
        compile_one = self.compiler._compile

        def compile_with_form_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            extra = FORM_FLAGS.get(Path(src).stem, []) if platform.machine() in ("x86_64", "AMD64") else []
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *extra], pp_opts)

        self.compiler._compile = compile_with_form_flags
        super().build_extensions()


def cpu_extension() -> Pybind11Extension:
    sources = sorted(str(p) for p in (CSRC / "cpu").glob("*.cpp"))
    return Pybind11Extension(
        "statestream._cpu",
        sources,
        cxx_std=17,
        extra_compile_args=EXACT,
        extra_link_args=["-pthread"],
        depends=HEADERS,
    )


ParallelCompile("STATESTREAM_BUILD_JOBS", default=0).install()
setup(ext_modules=[cpu_extension()], cmdclass={"build_ext": BuildExt})
