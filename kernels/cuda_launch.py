"""Compiles the sources of csrc/cuda for the GPU at hand, by NVRTC through cupy, and launches them on torch's current stream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

THREADS = 256
"""Of a block: kThreads of csrc/cuda/tiles.cuh."""

OPTIONS = ("-std=c++17", "--fmad=false")
"""No fused multiply-add: every step is rounded as the reference's."""

Argument = Tensor | float | int | np.ndarray
"""A tensor's address, a double, a 64-bit integer, or a structure passed by value (an array of one element)."""


class Launcher(Protocol):
    """Runs `kernel` of csrc/cuda/`file`, compiled with `macros`, on `blocks` blocks of `THREADS` threads."""

    def __call__(self, file: str, kernel: str, macros: Mapping[str, str | int], blocks: int, arguments: tuple[Argument, ...]) -> None: ...


@cache
def source(file: str) -> str:
    """The text of a source file, with what it includes in place, so that a compiler's cache sees every change."""
    return _expand(file, set())


def _expand(file: str, seen: set[str]) -> str:
    if file in seen:
        return ""
    seen.add(file)
    text = resources.files(f"{__package__}.cuda").joinpath(file).read_text().replace("#pragma once\n", "")
    return re.sub(r'#include "(\w+\.cuh)"\n', lambda match: _expand(match[1], seen), text)


@cache
def _compiled(file: str, kernel: str, macros: tuple[tuple[str, str | int], ...], device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        options = OPTIONS + tuple(f"-D{name}={value}" for name, value in macros)
        return cupy.RawModule(code=source(file), options=options, backend="nvrtc").get_function(kernel)


class _Handle:
    """A cudaStream_t, by CUDA's stream protocol."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


@lru_cache(maxsize=64)
def _stream(number: int, device: int) -> Any:
    """CuPy's view of a stream of torch's, whose cudaStream_t is `number`."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # from CuPy 14 on, which gives up ExternalStream
        return cupy.cuda.Stream.from_external(_Handle(number))
    return cupy.cuda.ExternalStream(number, device)


class CudaLauncher:
    """Launches on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index

    def __call__(self, file: str, kernel: str, macros: Mapping[str, str | int], blocks: int, arguments: tuple[Argument, ...]) -> None:
        import cupy

        function = _compiled(file, kernel, tuple(macros.items()), self._device)
        stream = _stream(torch.cuda.current_stream(self._device).cuda_stream, self._device)
        values = tuple(argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments)
        with cupy.cuda.Device(self._device), stream:
            function((blocks,), (THREADS,), values)
