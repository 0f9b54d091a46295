"""What a plan checks at each call, where C++ does not: before anything is written. Raises ValueError and TypeError, which `typed_errors`
turns into the package's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.memory import has_memory

_WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FLOATS = (*_WIDE, torch.float8_e4m3fn, torch.float8_e5m2)
_COMPLEX = (torch.complex64, torch.complex128)


class CallCheck:
    """What the native plans check in C++, for the others. Raises ValueError and TypeError."""

    def __init__(self, numels: Sequence[int], offsets: Sequence[int], total_numel: int, dtype: torch.dtype) -> None:
        self._numels = tuple(numels)
        self._offsets = tuple(offsets)
        self._total_numel = total_numel
        self._dtype = dtype

    def __call__(self, tensors: Sequence[Tensor | None], buffer: Tensor, scale: float, accumulate: bool) -> None:
        self.buffer(buffer)
        self.tensors(tensors, buffer.device, scale, accumulate)
        start = buffer.data_ptr()
        end = start + buffer.numel() * buffer.element_size()
        for i, (tensor, offset) in enumerate(zip(tensors, self._offsets, strict=True)):
            if tensor is None or tensor.numel() == 0:
                continue
            begin = tensor.data_ptr()
            overlaps = begin < end and start < begin + tensor.numel() * tensor.element_size()
            if overlaps and not (tensor.dtype == self._dtype and begin == start + offset * tensor.element_size()):
                raise ValueError(f"tensor {i} overlaps the buffer, but not at its own place in it")

    def buffer(self, buffer: Tensor) -> None:
        check_flat("buffer", buffer, self._dtype, self._total_numel, buffer.device)

    def tensors(self, tensors: Sequence[Tensor | None], device: torch.device, scale: float, accumulate: bool) -> None:
        """Of the tensors alone. device: the buffer's."""
        if len(tensors) != len(self._numels):
            raise ValueError(f"there are {len(tensors)} tensors, the layout has {len(self._numels)}")
        for i, (tensor, numel) in enumerate(zip(tensors, self._numels, strict=True)):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"expected a tensor at {i}, got {type(tensor).__name__}")
            if tensor.device != device:
                raise ValueError(f"tensor {i} is on {tensor.device}, the buffer on {device}")
            if not has_memory(tensor):
                raise ValueError(f"tensor {i} has no memory of its own: it wraps other tensors, as DTensor does, or is on no real device")
            if tensor.numel() != numel:
                raise ValueError(f"tensor {i} has {tensor.numel()} elements, the layout {numel}")
            if not _supported(tensor.dtype, self._dtype, scale, accumulate):
                raise TypeError(f"tensor {i} has dtype {tensor.dtype}, which can't be scaled, added or cast to or from {self._dtype}")


def _supported(one: torch.dtype, other: torch.dtype, scale: float, accumulate: bool) -> bool:
    """As `Copier::supports` in csrc/include/ddpcomm/copy.h."""
    if one == other and (one in _COMPLEX or (scale == 1 and not accumulate)):
        return True
    kinds = _WIDE if accumulate else _FLOATS
    return one in kinds and other in kinds


def check_flat(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, it must be {dtype}")
    if tensor.device.type != device.type:
        raise ValueError(f"{name} is on {tensor.device}, it must be on {device}")
    if tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and have {numel} elements, got shape {tuple(tensor.shape)}")


def check_statistics(statistics: Tensor, device: torch.device) -> None:
    check_flat("statistics", statistics, torch.float64, 2, device)


def typed(operation: str, error: Exception) -> Exception:
    if isinstance(error, TypeError):
        return ConfigurationTypeError(f"{operation}: {error}")
    return ConfigurationError(f"{operation}: {error}")


@contextmanager
def typed_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, ConfigurationTypeError):
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise typed(operation, error) from None
