"""Gradients travel as 8-bit codes with a scale for each 256, with error feedback.

Each rank quantises its share of the average (what was lost last time added), and all ranks gather everybody's codes; each then decodes
them and adds them up in float32, by rank, so that no sum is ever formed in 8 bits and all ranks get the same bits. What quantisation lost
stays at home and is added to the next step's gradients (error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech
2014; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).

Bytes received by a rank, of W: (W - 1) * 1.016 for each element, where a ring all-reduce of float32 takes 8 * (W - 1) / W: a quarter with
two ranks, as many with eight. Beyond that it does not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpcomm import ops
from ddpcomm.comm.base import Communicator, Work
from ddpcomm.errors import ConfigurationError
from ddpcomm.kernels.reference import QUANTISED_BLOCK

CODES = ("int8", "float8_e4m3", "float8_e5m2")


@dataclass(frozen=True)
class Quantized:
    """A hook that `register_comm_hook(None, ...)` takes. code: "int8", "float8_e4m3" or "float8_e5m2"."""

    code: str = "int8"

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ConfigurationError(f"code must be one of {', '.join(CODES)}, got {self.code!r}")

    def bind(self, communicator: Callable[[], Communicator]) -> Callable[[Any, Any], torch.futures.Future[Tensor]]:
        """The hook itself, with its residuals, over the communicator that `communicator` returns at each call."""
        return _QuantizedHook(self.code, communicator)


class _QuantizedHook:
    def __init__(self, code: str, communicator: Callable[[], Communicator]) -> None:
        self._code = code
        self._communicator = communicator
        self._buckets: dict[int, _QuantizedBucket] = {}
        self.__qualname__ = f"ddpcomm.hooks.Quantized({code!r})"

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        communicator, buffer = self._communicator(), bucket.buffer()
        if not buffer.is_floating_point():
            return _Pending(communicator.all_reduce(buffer, "avg" if buffer.is_complex() else "sum"), lambda: buffer)
        known = self._buckets.get(bucket.index())
        identity = tuple(id(parameter) for parameter in bucket.parameters())
        if known is None or not known.fits(identity, buffer, communicator):  # laid out anew: what was lost of the former is forgotten
            known = self._buckets[bucket.index()] = _QuantizedBucket(identity, buffer, communicator, self._code)
        return known.start(buffer)


class _QuantizedBucket:
    """One bucket's plan, residual, and room for every rank's codes."""

    def __init__(self, identity: tuple[int, ...], buffer: Tensor, communicator: Communicator, code: str) -> None:
        self._identity = (identity, buffer.numel(), buffer.dtype, communicator.world_size)
        self._communicator = communicator
        codes = -(-buffer.numel() // QUANTISED_BLOCK) * QUANTISED_BLOCK
        scales = codes // QUANTISED_BLOCK * 4
        self._plan = ops.QuantisePlan([buffer.numel()], [0], codes, buffer.device, code)
        self._residual = torch.zeros(codes, dtype=torch.float32, device=buffer.device)
        self._sum = torch.empty(buffer.numel(), dtype=torch.float32, device=buffer.device)
        self._own = communicator.empty(codes + scales, torch.uint8)
        self._all = communicator.empty((codes + scales) * communicator.world_size, torch.uint8)
        self._parts = [_split(part, codes) for part in self._all.view(communicator.world_size, -1)]
        self._own_parts = _split(self._own, codes)

    def fits(self, identity: tuple[int, ...], buffer: Tensor, communicator: Communicator) -> bool:
        return self._identity == (identity, buffer.numel(), buffer.dtype, communicator.world_size) and self._communicator is communicator

    def start(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        codes, scales = self._own_parts
        self._plan.quantise([buffer], codes, scales, 1.0 / self._communicator.world_size, self._residual)
        return _Pending(self._communicator.all_gather(self._all, self._own), self._add_up)

    def _add_up(self) -> Tensor:
        for rank, (codes, scales) in enumerate(self._parts):
            self._plan.dequantise(codes, scales, [self._sum], accumulate=rank > 0)
        return self._sum


def _split(payload: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """The codes, and the scales behind them."""
    return payload[:codes], payload[codes:].view(torch.float32)


class _Pending(torch.futures.Future[Tensor]):
    """A future that does the rest of its work in `wait`: on the caller's stream, and without a thread."""

    def __init__(self, work: Work, finish: Callable[[], Tensor]) -> None:
        super().__init__()
        self._work = work
        self._finish = finish

    def wait(self) -> Tensor:
        self._work.wait()
        return self._finish()
