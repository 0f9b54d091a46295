"""Other libraries that average gradients, as subjects of bench.step_time: those that are installed, and work here."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.data_parallel import DataParallel
from bench.devices import CPU, CUDA
from bench.floors import Wrap
from bench.subjects import OwnBackward

REPLICATE, DEEPSPEED, DATA_PARALLEL = "FSDP2 replicate", "DeepSpeed", "nn.DataParallel"
OWN_GROUP_BYTES = 1 << 20


def replicate(module: nn.Module) -> nn.Module:
    """FSDP2 without sharding. As its users do with a transformer's blocks, each child of 1 MiB or more becomes a group that is exchanged by
    itself while backward goes on; the rest is one group. In place; gradients become distributed tensors."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as apply

    wrap = partial(
        apply, mesh=init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    )
    for child in module.children():
        if sum(p.nbytes for p in child.parameters()) >= OWN_GROUP_BYTES:
            wrap(child)
    wrap(module)
    return module


class DeepSpeed(OwnBackward):
    """DeepSpeed's engine without ZeRO. It does not overlap, and when first used it builds an extension, which takes a minute."""

    def __init__(self, module: nn.Module) -> None:
        import deepspeed
        import torch

        super().__init__(module)
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)  # it asks for one
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)

    def forward(self, *inputs: Any) -> Any:
        return self.engine(*inputs)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)


_ALL: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    REPLICATE: ("torch.distributed._composable.replicate_with_fsdp", replicate),
    DEEPSPEED: ("deepspeed", DeepSpeed),
}


def rivals(device: str = CPU) -> dict[str, Wrap]:
    """By subject, what wraps a module on such devices."""
    found: dict[str, Wrap] = {name: wrap for name, (module, wrap) in _ALL.items() if find_spec(module)}
    if device == CUDA:
        found.pop(DEEPSPEED, None)
        found[DATA_PARALLEL] = DataParallel
    return found


def absent(device: str = CPU) -> str:
    """What is left out, and why; empty if nothing is.

    Never a subject: Horovod, whose newest release doesn't build against the torch of this project (docs/notes.md).
    """
    missing = [f"{name} ({module} can't be imported)" for name, (module, _) in _ALL.items() if not find_spec(module)]
    if device == CPU:
        missing.append(f"{DATA_PARALLEL} (needs GPUs: --device {CUDA})")
    elif find_spec("deepspeed"):
        missing.append(f"{DEEPSPEED} (set up for CPU ranks only)")
    return ", ".join(missing)
