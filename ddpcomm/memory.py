"""Whether a tensor has memory of its own."""

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
