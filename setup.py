"""Builds `ddpcomm._native`. Everything else about the package is in pyproject.toml.

csrc/ needs no torch, so that one wheel serves every torch release. Each file of csrc/cpu and csrc/bindings joins the extension by being
there. Code for newer processors lives in files of its own that choose their instruction set themselves; which one runs is decided when
the extension is loaded, so that no flag here depends on the machine that builds.
"""

import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# No fast-math, no contraction to fused multiply-add: results must be the same on every instruction set. Nobody reads floating-point
# exceptions, so that the compiler may turn comparisons into vector code.
compile_arguments = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-pthread"]
link_arguments = ["-pthread"] + (["-lrt"] if sys.platform.startswith("linux") else [])

native = Pybind11Extension(
    "ddpcomm._native",
    sources=sorted(glob("csrc/cpu/*.cpp") + glob("csrc/bindings/*.cpp")),
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    include_dirs=["csrc/include"],
    extra_compile_args=compile_arguments,
    extra_link_args=link_arguments,
    cxx_std=17,
)

with ParallelCompile("DDPCOMM_BUILD_JOBS", default=2):
    setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
