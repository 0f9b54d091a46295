"""Parameters and buffers from one rank to all: once at construction, and buffers before every training forward."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ddpcomm import ops
from ddpcomm.comm.base import Communicator
from ddpcomm.errors import RankMismatchError
from ddpcomm.layout import ALIGNMENT_BYTES
from ddpcomm.named_tensors import TensorWatch, named_buffers

MOST_BYTES = 250 * 1024 * 1024
_HEADER_BYTES = ALIGNMENT_BYTES


def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], source: int = 0, names: str = "tensors") -> None:
    """Copies rank `source`'s values into every rank's `tensors`, without bumping their versions. Collective, blocking on CPU ranks.

    Tensors of all dtypes travel together, in pieces of at most 250 MB, with a checksum of their shapes and dtypes at the head.

    Raises:
        RankMismatchError: the shapes or dtypes are not rank `source`'s. Nothing of this piece was taken over.
    """
    piece: list[Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if piece and size_bytes + tensor.nbytes > MOST_BYTES:
            Message(communicator, piece).broadcast(piece, source, names)
            piece, size_bytes = [], 0
        piece.append(tensor)
        size_bytes += tensor.nbytes
    if piece:
        Message(communicator, piece).broadcast(piece, source, names)


class Message:
    """Tensors that travel together, in one broadcast, with a checksum of their shapes and dtypes at the head.

    What that takes is prepared once, so that the same tensors can be sent again. Making one is local.
    """

    def __init__(self, communicator: Communicator, tensors: Sequence[Tensor]) -> None:
        self._communicator = communicator
        self._kinds = _kinds(tensors)
        self._positions: dict[torch.dtype, list[int]] = {}
        for position, tensor in enumerate(tensors):
            self._positions.setdefault(tensor.dtype, []).append(position)
        groups = {dtype: [tensors[position].detach() for position in where] for dtype, where in self._positions.items()}
        sizes = {dtype: sum(t.nbytes for t in group) for dtype, group in groups.items()}
        total = _HEADER_BYTES + sum(_aligned(size) for size in sizes.values())
        # Not from the communicator: its memory may have to be asked for by all ranks at once, and buffers may change on one alone.
        self._memory = torch.empty(total, dtype=torch.uint8, device=communicator.device)
        self._segments, start = {}, _HEADER_BYTES
        for dtype, size in sizes.items():
            self._segments[dtype] = self._memory[start : start + size].view(dtype)
            start += _aligned(size)
        self._checksum = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
        self._header = self._memory[:8].view(torch.int64)
        self._plans = {dtype: _plan(group) for dtype, group in groups.items() if all(ops.is_taken_as_it_is(t) for t in group)}

    def fits(self, communicator: Communicator, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors can be sent by it, over these ranks."""
        return self._communicator is communicator and self._kinds == _kinds(tensors)

    def broadcast(self, tensors: Sequence[Tensor], source: int, names: str) -> None:
        """Copies rank `source`'s values into every rank's `tensors`. Collective, blocking on CPU ranks.

        Raises:
            RankMismatchError: the shapes or dtypes are not rank `source`'s. Nothing was taken over.
        """
        communicator = self._communicator
        groups = {dtype: [tensors[position].detach() for position in where] for dtype, where in self._positions.items()}
        with torch.no_grad():
            if communicator.rank == source:
                self._header.fill_(self._checksum)
                for dtype, group in groups.items():
                    if plan := self._plans.get(dtype):
                        plan.flatten(group, self._segments[dtype])
                    else:
                        ops.flatten(group, self._segments[dtype])
            communicator.broadcast(self._memory, source).wait()
            if communicator.rank == source:
                return
            # On CUDA the host doesn't wait for the message, and so can't look at its head.
            if self._memory.device.type == "cpu" and self._header.item() != self._checksum:
                raise RankMismatchError(
                    f"{names} have other shapes or dtypes on rank {communicator.rank} than on rank {source}: "
                    f"here {[(tuple(t.shape), str(t.dtype)) for t in tensors[:10]]}"
                )
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):  # type: ignore[attr-defined]
                for dtype, group in groups.items():
                    if plan := self._plans.get(dtype):
                        plan.unflatten(self._segments[dtype], group)
                    else:
                        ops.unflatten(self._segments[dtype], group)


class ModuleBuffers:
    """A module's buffers, which one rank gives to all others again and again.

    Args:
        module: whose buffers.
        ignored: names of buffers to leave alone.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._named: dict[str, Tensor] = {}
        self._watch: TensorWatch | None = None
        self._message: Message | None = None

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now. Costs 5 ns a buffer and submodule, unless one came, went or was exchanged."""
        if self._watch is None or self._watch.changed():
            self._watch = TensorWatch(self._module, "_buffers")
            self._named = named_buffers(self._module, self._ignored)
        return self._named

    def broadcast(self, communicator: Communicator, source: int) -> None:
        """Takes over rank `source`'s. Collective, blocking on CPU ranks.

        Raises:
            RankMismatchError: the shapes or dtypes are not rank `source`'s. Nothing was taken over.
        """
        named = self.named()
        tensors = list(named.values())
        names = f"buffers {', '.join(named)}"
        if sum(t.nbytes for t in tensors) > MOST_BYTES:
            broadcast_tensors(communicator, tensors, source, names)
            return
        if self._message is None or not self._message.fits(communicator, tensors):
            self._message = Message(communicator, tensors)
        self._message.broadcast(tensors, source, names)


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(t.dtype, t.device, t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in tensors]


def _plan(tensors: Sequence[Tensor]) -> ops.FlattenPlan:
    """Of tensors that lie one after another."""
    ends = list(accumulate(t.numel() for t in tensors))
    return ops.FlattenPlan([t.numel() for t in tensors], [0, *ends[:-1]], ends[-1], tensors[0].dtype, tensors[0].device)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
