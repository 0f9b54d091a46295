"""Other libraries that average gradients, as subjects of bench.step_time: where they can be imported."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.subjects import Wrap

REPLICATE = "FSDP2 replicate"
OWN_GROUP_BYTES = 1 << 20
NOT_MEASURED = {
    "horovod": "Horovod: has no wheel, and does not start within a process group that exists",
    "deepspeed": "DeepSpeed: is no rival on CPU ranks",
}


def rivals() -> dict[str, Wrap]:
    """By subject, what wraps a module."""
    return {REPLICATE: replicate} if find_spec("torch.distributed._composable.replicate_with_fsdp") else {}


def replicate(module: nn.Module) -> nn.Module:
    """FSDP2 without sharding. As its users do with a transformer's blocks, each child of 1 MiB or more becomes a group that is exchanged by
    itself while backward goes on; the rest is one group. In place; gradients become distributed tensors."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as apply

    wrap = partial(apply, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",)))
    for child in module.children():
        if sum(p.nbytes for p in child.parameters()) >= OWN_GROUP_BYTES:
            wrap(child)
    wrap(module)
    return module
