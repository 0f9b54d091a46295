"""Whether a tensor has memory of its own, and how its elements lie in it."""

from __future__ import annotations

from torch import Tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a dense tensor lie somewhere. Subclasses that wrap other tensors, such as DTensor, have none of their own."""
    if tensor.numel() == 0:
        return True
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def by_stride(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of every dimension of more than one element, the innermost first."""
    return sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share one place in memory. Exact for every view that slicing, expanding and transposing make."""
    end = 0
    for stride, size in by_stride(tensor):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False
