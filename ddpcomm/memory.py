"""Whether a tensor has memory of its own, and each of its elements."""

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


def has_place_for_each(tensor: Tensor) -> bool:
    """Whether no two elements of a dense tensor share a place because it was expanded: what shares one can't be written to."""
    return tensor.numel() == 0 or all(size == 1 or stride != 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
