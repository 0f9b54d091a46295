"""ddpcomm's own communication hooks.

`ddp.register_comm_hook(None, ddpcomm.hooks.bf16)` and `fp16` reduce gradients in a 16-bit format: the cast is part of flatten and
unflatten, so that nothing but the bytes on the wire changes. `quantized` sends 8-bit codes, with error feedback. Torch's own hooks work
as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddpcomm.errors import ConfigurationError
from ddpcomm.hooks.quantized import Quantized

__all__ = ["Quantized", "WireFormat", "bf16", "fp16", "quantized"]


@dataclass(frozen=True)
class WireFormat:
    """Gradients travel, and are summed, in `dtype`, each divided by the world size before it is cast; complex ones in their own.

    CPU and CUDA.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point and self.dtype.itemsize >= 2):
            raise ConfigurationError(f"dtype must be a floating-point one of 16 bits or more, got {self.dtype!r}")

    @property
    def name(self) -> str:
        """What logs call it."""
        return f"ddpcomm.hooks.WireFormat({self.dtype})"


bf16 = WireFormat(torch.bfloat16)
fp16 = WireFormat(torch.float16)
quantized = Quantized()
