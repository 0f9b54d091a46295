"""Where the ranks of a benchmark compute: all on the CPU, or each on a GPU of its own."""

from __future__ import annotations

import torch

CPU, CUDA = "cpu", "cuda"
BACKENDS = {CPU: "gloo", CUDA: "cpu:gloo,cuda:nccl"}
"""What torch.distributed exchanges tensors with. Notes and barriers stay on the host."""


def take(kind: str, rank: int) -> torch.device:
    """This rank's device.

    Raises:
        ValueError: there are not enough GPUs.
    """
    if kind == CPU:
        return torch.device(CPU)
    if rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {rank} needs a GPU of its own, and there are {torch.cuda.device_count()}: take --device cpu or fewer --ranks"
        )
    torch.cuda.set_device(rank)
    torch.backends.cudnn.deterministic = True  # gradients are compared bit for bit
    torch.backends.cudnn.benchmark = False
    return torch.device(CUDA, rank)
