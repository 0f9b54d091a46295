"""nn.DataParallel as a subject: rank 0's process drives all GPUs, on all ranks' batches, while the other ranks' processes stand by."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.subjects import OwnBackward


class DataParallel(OwnBackward):
    """One step of it is one of all ranks together. Rank 0 alone has gradients, of the mean over all batches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        device = next(module.parameters()).device
        self.works = dist.get_rank() == 0
        self.replicas = nn.DataParallel(module, list(range(dist.get_world_size()))) if device.type == "cuda" else module
        self._batches: Tensor | None = None

    def forward(self, batch: Tensor) -> Tensor:
        """Collective the first time, when rank 0 gets the others' batches."""
        if self._batches is None:
            self._batches = _gather(batch)
        output: Tensor = self.replicas(self._batches) if self.works else torch.zeros(1)
        return output

    def backward(self, loss: Tensor) -> None:
        if self.works:
            loss.backward()


def _gather(batch: Tensor) -> Tensor:
    """Every rank's batch, one after another. Collective."""
    batches = [torch.empty_like(batch) for _ in range(dist.get_world_size())]
    dist.all_gather(batches, batch)
    return torch.cat(batches)
