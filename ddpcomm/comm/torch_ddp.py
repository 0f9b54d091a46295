"""Torch's own DistributedDataParallel, where it is asked for by name: by isinstance checks, and by torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferCommHookLocation

from ddpcomm import env

BuiltinCommHookType = dist.BuiltinCommHookType  # type: ignore[attr-defined]
ProcessGroup = dist.ProcessGroup

__all__ = [
    "BufferCommHookLocation",
    "BuiltinCommHookType",
    "ProcessGroup",
    "TorchDDP",
    "active_ddp",
    "active_module",
    "all_groups",
    "count_optimizer_hooks",
    "default_group",
    "environment_facts",
    "take_over_optimizer_hooks",
]


@contextmanager
def active_module(module: nn.Module) -> Iterator[None]:
    """While `module` runs its forward, torch.compile's DDPOptimizer finds it here, and cuts graphs at its bucket size."""
    former = TorchDDP._active_ddp_module
    TorchDDP._active_ddp_module = module  # type: ignore[assignment]  # all that is read of it is bucket_bytes_cap
    try:
        yield
    finally:
        TorchDDP._active_ddp_module = former


def active_ddp() -> nn.Module | None:
    """The wrapper whose forward is running, if any."""
    return TorchDDP._active_ddp_module


def default_group() -> ProcessGroup | None:
    """The default process group, or None before `init_process_group`."""
    return dist.group.WORLD if dist.is_initialized() else None


def all_groups() -> list[ProcessGroup]:
    """The process groups that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


def count_optimizer_hooks() -> int:
    """How many steps of optimizers `_apply_optimizer_in_backward` has attached to parameters, in the whole process."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return 0 if module is None else sum(map(len, module.param_to_optim_hook_handle_map.values()))


def take_over_optimizer_hooks(parameters: list[torch.Tensor]) -> list[Callable[[], None]]:
    """Steps of optimizers that `torch.distributed.optim._apply_optimizer_in_backward` attached to these parameters.

    Torch runs such a step as soon as a gradient has accumulated. It is taken off there, to be called when the gradient is averaged.
    """
    optimized = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if not optimized:
        return []
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in optimized:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):  # type: ignore[no-untyped-call]
            handle.remove()
    optimizers = dict.fromkeys(optimizer for p in optimized for optimizer in p._in_backward_optimizers)

    def step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return run

    return [step(optimizer) for optimizer in optimizers]


def environment_facts(process_group: ProcessGroup) -> dict[str, str | int]:
    """What torch's logging data tells of the process group and its environment."""
    variables = {
        "master_port": "MASTER_PORT",
        "master_addr": "MASTER_ADDR",
        "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
        "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    }
    backend = dist.get_backend(process_group)
    if backend == "gloo":
        variables.update(gloo_socket_ifname="GLOO_SOCKET_IFNAME", gloo_device_transport="GLOO_DEVICE_TRANSPORT")
    facts: dict[str, str | int] = {"backend_name": backend, **env.torch_variables(variables)}
    if backend == "gloo":
        options = process_group._get_backend(torch.device("cpu")).options
        facts["gloo_num_threads"] = getattr(options, "_threads", 0)
    return facts
