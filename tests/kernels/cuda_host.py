"""A launcher that compiles csrc/cuda as host C++ and runs it there, in place of `CudaLauncher`."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ddpcomm.kernels.cuda_launch import Argument, source

HERE = Path(__file__).parent


class HostLauncher:
    """Compiles into `directory`, each combination of macros once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._libraries: dict[str, Any] = {}

    def __call__(self, file: str, kernel: str, macros: Mapping[str, str | int], blocks: int, arguments: tuple[Argument, ...]) -> None:
        entry = self._entry(file, kernel, macros)
        values: list[Any] = [ctypes.c_int64(blocks)]
        for argument in arguments:
            if isinstance(argument, Tensor):
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, np.ndarray):
                values.append(ctypes.c_void_p(argument.ctypes.data))
            else:
                values.append(ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument))
        entry(*values)

    def _entry(self, file: str, kernel: str, macros: Mapping[str, str | int]) -> Any:
        name = "_".join([kernel, *(f"{key}-{value}" for key, value in macros.items())])
        if name not in self._libraries:
            text = self._directory / file
            text.write_text(source(file))
            library = self._directory / f"{name}.so"
            options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{HERE}"]
            defines = [f"-D{key}={value}" for key, value in macros.items()] + [f"-DKERNEL_{kernel}", f'-DFILE_OF_KERNEL="{text}"']
            command = ["g++", *options, *defines, str(HERE / "cuda_host.cpp"), "-o", str(library)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert run.returncode == 0, run.stderr[-4000:]
            self._libraries[name] = ctypes.CDLL(str(library))
        return self._libraries[name].entry
