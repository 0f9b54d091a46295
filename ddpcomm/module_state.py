"""Parameters and buffers from one rank to all: once at construction, and buffers before every training forward."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ddpcomm import ops
from ddpcomm.comm.base import Communicator
from ddpcomm.errors import RankMismatchError
from ddpcomm.layout import ALIGNMENT_BYTES

MOST_BYTES = 250 * 1024 * 1024
_HEADER_BYTES = ALIGNMENT_BYTES


def named_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """The buffers as they are now, re-assigned ones too."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


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
            _broadcast_piece(communicator, piece, source, names)
            piece, size_bytes = [], 0
        piece.append(tensor)
        size_bytes += tensor.nbytes
    if piece:
        _broadcast_piece(communicator, piece, source, names)


def _broadcast_piece(communicator: Communicator, tensors: list[Tensor], source: int, names: str) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    sizes = {dtype: sum(t.nbytes for t in group) for dtype, group in by_dtype.items()}
    total = _HEADER_BYTES + sum(_aligned(size) for size in sizes.values())
    message = communicator.empty(total, torch.uint8)
    segments, start = {}, _HEADER_BYTES
    for dtype, size in sizes.items():
        segments[dtype] = message[start : start + size].view(dtype)
        start += _aligned(size)
    checksum = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())
    header = message[:8].view(torch.int64)
    header.fill_(checksum)
    with torch.no_grad():
        if communicator.rank == source:
            for dtype, group in by_dtype.items():
                ops.flatten([t.detach() for t in group], segments[dtype])
        communicator.broadcast(message, source).wait()
        if communicator.rank == source:
            return
        # On CUDA the host doesn't wait for the message, and so can't look at its head.
        if message.device.type == "cpu" and header.item() != checksum:
            raise RankMismatchError(
                f"{names} have other shapes or dtypes on rank {communicator.rank} than on rank {source}: "
                f"here {[(tuple(t.shape), str(t.dtype)) for t in tensors[:10]]}"
            )
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):  # type: ignore[attr-defined]
            for dtype, group in by_dtype.items():
                ops.unflatten(segments[dtype], [t.detach() for t in group])


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
