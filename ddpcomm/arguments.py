"""Torch's constructor arguments: their meaning, and the checks of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddpcomm.argument_checks import check_device, check_flag, check_sequence
from ddpcomm.config import ReducerOptions, bucket_caps
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.memory import has_memory, overlaps_itself
from ddpcomm.named_tensors import named_buffers, named_parameters
from ddpcomm.nonfinite import NonFinite, check_choice


@dataclass(frozen=True)
class Placement:
    """Where the module's parameters are, and where inputs have to go: `input_device` is None where they stay."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    input_device: torch.device | None


def check_types(module: Any, flags: Mapping[str, Any], transport: Any, device_ids: Any) -> None:
    """What kinds of things the constructor was given.

    Raises:
        ConfigurationTypeError: another kind than is asked for.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationTypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    for name, value in flags.items():
        check_flag(name, value)
    if not isinstance(transport, str):
        raise ConfigurationTypeError(f"transport must be the name of a transport, got {transport!r}")
    if device_ids is not None:
        check_sequence("device_ids", device_ids)


def placement(parameters: Sequence[Tensor], device_ids: Sequence[Any] | None, output_device: Any) -> Placement:
    """Checks `device_ids` and `output_device` against where the parameters are.

    Raises:
        ConfigurationTypeError: what names no device.
        ConfigurationError: more than one device id, device ids for a module on CPU or on several devices, several device types.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigurationError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in parameters}
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ConfigurationError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but input module parameters locate in {sorted(types)}."
        )
    device = parameters[0].device
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ConfigurationError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules "
                f"or CPU modules, but got device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return Placement(device, None, None, None)
    index = _index(device_ids[0], device.type)
    return Placement(
        device, [index], index if output_device is None else _index(output_device, device.type), torch.device(device.type, index)
    )


def _index(device: Any, kind: str) -> int:
    is_number = isinstance(device, int) and not isinstance(device, bool)
    found = check_device("device_ids and output_device", f"{kind}:{device}" if is_number else device)
    if found.type != kind or found.index is None:
        raise ConfigurationError(f"device_ids and output_device must name a {kind} device by its index, got {device!r}")
    return found.index


def buffer_synchronization(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are synchronised before forwards, and at construction. Torch deprecated the first argument for the second."""
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and its value is "
                "ignored when `forward_sync_buffers` is provided.",
                FutureWarning,
                stacklevel=3,
            )
        return forward_sync_buffers, True
    if broadcast_buffers is None:
        return True, True
    warnings.warn(
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. Unlike `broadcast_buffers=False`, "
        "`forward_sync_buffers=False` still synchronises buffers at construction.",
        FutureWarning,
        stacklevel=3,
    )
    return broadcast_buffers, broadcast_buffers


def ignored_names(module: nn.Module) -> set[str]:
    """Parameters and buffers that `_set_params_and_buffers_to_ignore_for_model` named."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def delayed_names(named: Iterable[tuple[str, Tensor]] | None, hook_parameter: Tensor | None) -> list[str]:
    """Names of `delay_all_reduce_named_params`.

    Raises:
        ConfigurationTypeError: it is no list of names and parameters.
        ConfigurationError: one of the two arguments stands without the other.
    """
    if (named is None) != (hook_parameter is None):
        raise ConfigurationError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    pairs = list(named or ()) if isinstance(named, Iterable | None) else [named]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigurationTypeError(f"delay_all_reduce_named_params must be a list of (name, parameter), got {named!r}")
    return [name for name, _ in pairs]


_BY_NAME = "with DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"


def check_module(module: nn.Module, ignored: set[str]) -> list[Tensor]:
    """The module's parameters that are not ignored.

    Raises:
        ConfigurationError: none of them takes gradients, or one, or a buffer, isn't initialised, isn't dense, has no memory or is expanded.
    """
    named = list(named_parameters(module, ignored))
    buffers = list(named_buffers(module, ignored).items())
    for name, tensor in named + buffers:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigurationError(
                f"{name} is not initialised: modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                "Run a dummy forward pass to correctly initialize the modules"
            )
        if tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"{name} is {tensor.layout}, which can't be sent to other ranks: keep it dense, or leave it out {_BY_NAME}"
            )
        if not has_memory(tensor):
            raise ConfigurationError(
                f"{name} ({type(tensor).__name__} on {tensor.device}) has no memory of its own, like a DTensor or a tensor on the meta "
                "device, and can't be sent to other ranks. Materialise it first; what is sharded over ranks is for FSDP2; or leave it out "
                + _BY_NAME
            )
        if tensor.numel() and overlaps_itself(tensor):
            raise ConfigurationError(f"{name} is expanded: several of its elements are one in memory. Clone it, or leave it out {_BY_NAME}")
    if not any(p.requires_grad for _, p in named):
        raise ConfigurationError("DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.")
    return [p for _, p in named]


def reducer_options(
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    *,
    gradient_as_bucket_view: bool,
    find_unused_parameters: bool,
    static_graph: bool,
    skip_all_reduce_unused_params: bool,
    error_on_unsynchronized: bool,
    nonfinite: NonFinite,
) -> ReducerOptions:
    """The reducer's share of the arguments.

    Raises:
        ConfigurationError: a value that isn't allowed.
    """
    check_choice(nonfinite)
    return ReducerOptions(
        caps=bucket_caps(bucket_cap_mb, bucket_cap_mb_list),
        gradient_as_bucket_view=gradient_as_bucket_view,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        skip_unused_buckets=skip_all_reduce_unused_params,
        check_at_once=error_on_unsynchronized or nonfinite != "ignore",
        nonfinite=nonfinite,
    )


def anywhere() -> Placement:
    """Where a rank whose module can't be served exchanges the reason."""
    return Placement(torch.device("cpu"), None, None, None)


def warn_check_reduction() -> None:
    """Torch deprecated the argument."""
    warnings.warn(
        "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
        FutureWarning,
        stacklevel=3,
    )


def process_group_of(process_group: Any, device_mesh: Any) -> Any:
    """The group that `process_group` or `device_mesh` names.

    Raises:
        ConfigurationTypeError: the mesh is none.
        ConfigurationError: both are given, or the mesh has several dimensions.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ConfigurationError("Cannot specify both process_group and device_mesh arguments.")
    if not (hasattr(device_mesh, "ndim") and hasattr(device_mesh, "get_group")):
        raise ConfigurationTypeError(f"device_mesh must be a DeviceMesh, got {device_mesh!r}")
    if device_mesh.ndim != 1:
        raise ConfigurationError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)
