"""Tiles: how the work between a buffer and its tensors is cut into equal pieces, and the tables that tell a kernel about them.

A tile is at most `TILE` elements of one tensor, so that work is balanced by bytes: ten thousand tensors of 16 bytes beside one of 500 MB
keep every multiprocessor busy. The tables are built once a layout and stay on the device; per call only the tensors' addresses travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

TILE = 4096
"""Elements of a tile. With 256 threads, 16 a thread: four 128-bit accesses of float32 under way at once."""

COLUMNS = 4
"""Of the table: tensor's index; first element in the tensor; first element in the buffer; elements of the tensor, plus 2^32 times the
elements of the buffer that the tile is to write (more than the tensor's where a gap follows)."""

ABSENT = 0
"""Address of a tensor that is not there: its place becomes zero."""
OTHER = -1
"""Address of a tensor that another launch sees to: one whose dtype differs."""


def tile_table(numels: Sequence[int], offsets: Sequence[int], total_numel: int, *, gaps: bool) -> np.ndarray:
    """The table, an array of int64 of shape (tiles, COLUMNS).

    Args:
        gaps: tiles also cover what lies between tensors, and before the first: `numels` as the tensor's index stands for none.
    """
    numel = np.asarray([*numels, 0], dtype=np.int64)
    offset = np.asarray([*offsets, 0], dtype=np.int64)
    if gaps:  # each tensor's stretch reaches to the next one's; a last, absent tensor stands for the gap at the beginning
        ends = np.append(offset[1:-1], total_numel) if len(numels) else np.empty(0, np.int64)
        stretch = np.append(ends - offset[:-1], offset[0] if len(numels) else total_numel)
    else:
        stretch = numel.copy()
    tiles = -(-stretch // TILE)
    tensor = np.repeat(np.arange(len(numel)), tiles)
    first = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * TILE
    valid = np.clip(numel[tensor] - first, 0, TILE)
    written = np.minimum(stretch[tensor] - first, TILE)
    return np.stack([tensor, first, offset[tensor] + first, valid + (written << 32)], axis=1)


class AddressTable:
    """The tensors' addresses on the device, sent again only when they have changed.

    A copy from pinned memory must not see the next call's addresses, so there are several pinned tables, each with the event of its last
    copy. The table on the device is one: calls that share it belong to one stream. On the CPU, under Triton's interpreter, the table is
    used where it is.
    """

    PINNED_TABLES = 4

    def __init__(self, count: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._count = count + 1  # the last is the absent tensor of `tile_table`
        self._sent: list[int] | None = None
        self._device_table = torch.zeros(self._count, dtype=torch.int64, device=device)
        self._next = 0
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        if self._cuda:
            for _ in range(self.PINNED_TABLES):
                self._pinned.append((torch.zeros(self._count, dtype=torch.int64, pin_memory=True), torch.cuda.Event()))

    def __call__(self, addresses: list[int]) -> Tensor:
        """The table on the device, in order with the current stream."""
        addresses = [*addresses, ABSENT]
        if addresses != self._sent:
            self._send(addresses)
            self._sent = addresses
        return self._device_table

    def _send(self, addresses: list[int]) -> None:
        if not self._cuda:
            self._device_table.numpy()[:] = addresses
            return
        pinned, copied = self._pinned[self._next]
        self._next = (self._next + 1) % self.PINNED_TABLES
        copied.synchronize()
        pinned.numpy()[:] = addresses
        self._device_table.copy_(pinned, non_blocking=True)
        copied.record()
