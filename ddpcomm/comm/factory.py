"""Makes communicators: by the name of a transport, or the best one for the ranks at hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpcomm import env
from ddpcomm.argument_checks import check_device, check_timeout
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.comm.process_group import ProcessGroupCommunicator, resolve
from ddpcomm.comm.rendezvous import Rendezvous
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError, DDPCommError, RankMismatchError, TransportUnavailableError

_log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shared_memory", "hierarchical", "process_group", "nccl", "fake")


def create_communicator(
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    transport: str = "auto",
    timeout: timedelta | None = None,
    **options: Any,
) -> Communicator:
    """Makes a communicator for the ranks of `process_group`. Collective over it, except for "process_group" and "fake".

    Args:
        process_group: the ranks; None means the default group. The caller goes on owning it.
        device: where the tensors will live; None means the group's own kind of device: the current CUDA device where the group is for CUDA
            only, else the CPU.
        transport: "auto" takes DDPCOMM_TRANSPORT if that is set; else, for the CPU, "shared_memory" where all ranks are found on one host,
            "hierarchical" where some host has several, "process_group" otherwise; for CUDA "nccl" where it can be had, else
            "process_group".
        timeout: time limit of every collective; None means DDPCOMM_TIMEOUT_SECONDS, else the group's own.
        options: the transport's own; see its class. Not with "auto".

    Raises:
        ConfigurationError: there is no such transport or option, or it doesn't serve the device, or this process isn't in the group.
        TransportUnavailableError: the transport that was asked for can't serve these ranks. On every rank.
    """
    environment = env.read()
    if not isinstance(transport, str) or transport not in TRANSPORTS:
        raise ConfigurationError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if transport == "auto":
        transport = environment_transport()
    if timeout is not None:
        timeout = check_timeout("timeout", timeout)
    if device is not None:
        device = check_device("device", device)
    if transport == "fake":
        try:
            return _fake(device, timeout, options)
        except TypeError as error:
            raise ConfigurationError(f"{transport}: {error}") from error
    group = resolve(process_group)
    target = _device(group, device)
    limit = timeout or environment.timeout
    if transport == "auto":
        if options:
            raise ConfigurationError(f'options need a transport that is named, not "auto": {", ".join(options)}')
        return _automatic(group, target, limit)
    maker = _MAKERS[transport]
    try:
        return maker(group, target, limit, options)
    except TypeError as error:
        if isinstance(error, ConfigurationTypeError):
            raise
        raise ConfigurationError(f"{transport}: {error}") from error


def environment_transport() -> str:
    """What DDPCOMM_TRANSPORT says.

    Raises:
        ConfigurationError: it names no transport that moves data.
    """
    transport = env.read().transport
    if transport not in TRANSPORTS[:-1]:
        raise ConfigurationError(f"DDPCOMM_TRANSPORT must be one of {', '.join(TRANSPORTS[:-1])}, got {transport!r}")
    return transport


def require_same_transport(process_group: dist.ProcessGroup, transport: str, timeout: timedelta | None, options: Mapping[str, Any]) -> None:
    """Raises on every rank if the ranks are about to use different transports. Collective. Arguments as for `create_communicator`.

    Raises:
        RankMismatchError: names the transports.
        CommunicationError: a rank is lost, or did not come in time.
    """
    if process_group.size() == 1:
        return
    environment = env.read()
    limit = timeout or environment.timeout
    names = ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
    chosen = repr(environment.transport if transport == "auto" else transport) + (f" with {names}" if names else "")
    kinds = {kind.type for kind in process_group._device_types}
    if "cpu" in kinds:
        told = all_gather_objects(ProcessGroupCommunicator(process_group, torch.device("cpu"), limit), chosen)
        for rank, other in enumerate(told):
            if other != told[0]:
                raise RankMismatchError(
                    f"rank 0 is to use transport {told[0]}, rank {rank} {other}: set transport=, transport_options= and DDPCOMM_TRANSPORT "
                    "alike on every rank"
                )
    elif kinds:  # to start a backend for GPUs takes seconds and memory, where it may not be used later
        try:
            meeting = Rendezvous.of(process_group, "transport", limit or group_timeout(process_group))
        except (KeyError, ValueError):  # a group that torch.distributed hasn't made has no store
            return
        meeting.check_equal("transport (transport=, transport_options=, DDPCOMM_TRANSPORT)", chosen)


def _automatic(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> Communicator:
    """The first transport that works. The ranks try the same ones in the same order: each attempt fails on all of them or on none."""
    candidates = ("nccl",) if device.type == "cuda" else ("shared_memory", "hierarchical") if device.type == "cpu" else ()
    for transport in candidates:
        try:
            if transport == "nccl":
                _check_nccl(group, device)
            return _MAKERS[transport](group, device, timeout, {})
        except TransportUnavailableError as error:
            _log.info("transport %s is not used: %s", transport, error)
    return _process_group(group, device, timeout, {})


def _check_nccl(group: dist.ProcessGroup, device: torch.device) -> None:
    """Whether every rank has what the transport needs. Collective."""
    problem = ""
    try:
        from ddpcomm.comm.nccl_library import Nccl4pyLibrary

        Nccl4pyLibrary()
    except (ImportError, OSError, DDPCommError) as error:
        problem = f"rank {group.rank()}: {error}"
    problems = [text for text in all_gather_objects(ProcessGroupCommunicator(group, device), problem) if text]
    if problems:
        raise TransportUnavailableError(f"nccl can't be used: {'; '.join(problems)}")


def _process_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None, options: dict[str, Any]) -> Communicator:
    return ProcessGroupCommunicator(group, device, timeout, **options)


def _shared_memory(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None, options: dict[str, Any]) -> Communicator:
    from ddpcomm.comm.shared_memory import create_shared_memory

    return create_shared_memory(_on_cpu(group, device, "shared_memory", timeout), timeout or group_timeout(group), **options)


def _hierarchical(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None, options: dict[str, Any]) -> Communicator:
    from ddpcomm.comm.hierarchical import create_hierarchical

    return create_hierarchical(_on_cpu(group, device, "hierarchical", timeout), timeout or group_timeout(group), **options)


def _nccl(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None, options: dict[str, Any]) -> Communicator:
    from ddpcomm.comm.nccl import NcclCommunicator

    return NcclCommunicator.create(group, device, timeout or group_timeout(group), **options)


def _fake(device: torch.device | str | int | None, timeout: timedelta | None, options: dict[str, Any]) -> Communicator:
    from ddpcomm.comm.fake import FakeCommunicator

    return FakeCommunicator(device=torch.device("cpu" if device is None else device), timeout=timeout, **options)


_Maker = Callable[[dist.ProcessGroup, torch.device, timedelta | None, dict[str, Any]], Communicator]
_MAKERS: dict[str, _Maker] = {
    "process_group": _process_group,
    "shared_memory": _shared_memory,
    "hierarchical": _hierarchical,
    "nccl": _nccl,
}


def _on_cpu(group: dist.ProcessGroup, device: torch.device, transport: str, timeout: timedelta | None) -> ProcessGroupCommunicator:
    if device.type != "cpu":
        raise ConfigurationError(f"{transport} is for CPU tensors, not for {device}")
    return ProcessGroupCommunicator(group, device, timeout)


def _device(group: dist.ProcessGroup, device: torch.device | str | int | None) -> torch.device:
    if device is not None:
        found = torch.device(device)
    else:
        kinds = {kind.type for kind in group._device_types}
        found = torch.device("cpu" if "cpu" in kinds or not kinds else sorted(kinds)[0])
    if found == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return found


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The group's own time limit; torch's default one where it can't be told."""
    try:
        found = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        found = None
    return found if isinstance(found, timedelta) else dist.distributed_c10d.default_pg_timeout
