"""The addresses of a call's tensors, as the device kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tiles import ABSENT, OTHER


def addresses_of(tensors: Sequence[Tensor | None], dtype: torch.dtype, absent: int = ABSENT) -> list[int]:
    """Addresses of those of `dtype`; `absent` and OTHER in place of the rest."""
    return [absent if tensor is None else tensor.data_ptr() if tensor.dtype == dtype else OTHER for tensor in tensors]


def source_dtypes(tensors: Sequence[Tensor | None], default: torch.dtype) -> list[torch.dtype]:
    """The dtypes that occur, each once: a kernel is launched for each. `default` where there is no tensor at all."""
    return list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor is not None)) or [default]
