"""The addresses of a call's tensors, as the device kernels take them: in groups of one dtype, a launch each.

`ddpcomm._native` reads them much faster than `group` here, and checks the call on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tiles import ABSENT, OTHER

Groups = Sequence[tuple[torch.dtype, list[int]]]
"""For each dtype that occurs (one at least), an address for each tensor: ABSENT in the first group, OTHER in the rest, where there is no
tensor; OTHER where the tensor has another dtype."""


def group(tensors: Sequence[Tensor | None], default: torch.dtype) -> Groups:
    """`default` is the dtype of the only group where there is no tensor at all."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor is not None and tensor.numel() > 0)) or [default]
    groups = []
    for number, dtype in enumerate(dtypes):
        none = ABSENT if number == 0 else OTHER
        present = [tensor if tensor is not None and tensor.numel() > 0 else None for tensor in tensors]
        groups.append((dtype, [none if t is None else t.data_ptr() if t.dtype == dtype else OTHER for t in present]))
    return groups
