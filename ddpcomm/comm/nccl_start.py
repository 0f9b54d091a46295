"""Starting NCCL communicators: the ranks find out together whether they can, so that it works on all of them or fails on all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ddpcomm.comm.cuda_runtime import CudaRuntime, for_device
from ddpcomm.comm.nccl_lane import settle
from ddpcomm.comm.nccl_library import Handle, Nccl4pyLibrary, NcclLibrary, dotted
from ddpcomm.comm.nccl_options import NcclOptions
from ddpcomm.comm.rendezvous import Distress, Rendezvous
from ddpcomm.errors import CommunicationError, ConfigurationError, ConfigurationTypeError, TransportUnavailableError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_LISTEN_SECONDS = 0.1


@dataclass(frozen=True)
class Equipment:
    """What one rank needs for NCCL. `config` holds the fields of ncclConfig_t."""

    device: torch.device
    options: NcclOptions
    config: Mapping[str, int | str]
    library: NcclLibrary
    runtime: CudaRuntime


def equip(
    rendezvous: Rendezvous,
    device: torch.device | None,
    options: Mapping[str, Any],
    library: NcclLibrary | None = None,
    runtime: CudaRuntime | None = None,
) -> Equipment:
    """Checks options, library and device on every rank. Collective.

    Args:
        device: None means the current CUDA device.
        library, runtime: None means the machine's own.

    Raises:
        ConfigurationError, ConfigurationTypeError: an option can't be, or this libnccl lacks it.
        TransportUnavailableError: this rank, or another, has no GPU or no library, or another's options can't be.
        RankMismatchError: ranks have other options or another libnccl.
    """

    def collect() -> Equipment:
        chosen = NcclOptions.from_keywords(options)
        loaded = library or Nccl4pyLibrary()
        config = chosen.config(loaded.version)
        target = device or torch.device("cuda")
        if runtime is not None:
            return Equipment(target, chosen, config, loaded, runtime)
        target, found = for_device(target)
        return Equipment(target, chosen, config, loaded, found)

    equipment = _together(rendezvous, collect)
    version = equipment.library.version
    chosen = equipment.options
    rendezvous.check_equal("NCCL options", f"{chosen} with libnccl {dotted(version)}")
    if chosen.communicators > 1 and chosen.side_by_side is None and not chosen.runs_side_by_side(version):
        _log.warning("libnccl %s can't order the kernels of several communicators: they run in turn (option side_by_side)", dotted(version))
    return equipment


def connect(rendezvous: Rendezvous, equipment: Equipment, limit: timedelta) -> list[Handle]:
    """Starts `options.communicators` communicators among all ranks, one after another. Collective; their identifiers go through the store.

    Raises:
        TransportUnavailableError: libnccl can't connect these ranks.
        CollectiveTimeoutError, CommunicationError: some rank didn't come.
    """
    library, runtime = equipment.library, equipment.runtime
    number = equipment.options.communicators
    handles: list[Handle] = []

    def identify() -> str:
        return " ".join(library.unique_id().hex() for _ in range(number)) if rendezvous.rank == 0 else ""

    listen = _Listener(rendezvous)

    def start() -> list[Handle]:
        for identifier in map(bytes.fromhex, identifiers.split()):
            with runtime.on_device():
                handles.append(library.start(rendezvous.world_size, rendezvous.rank, identifier, equipment.config))
            settle(library, handles[-1], f"starting NCCL communicator {len(handles) - 1}", limit, listen)
        return handles

    identifiers = rendezvous.from_first(_together(rendezvous, identify))
    try:
        return _together(rendezvous, start)
    except (ConfigurationError, CommunicationError):
        for handle in handles:
            library.abort(handle)
        raise


class _Listener:
    """Whether another rank has failed, asked of the store now and then."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._next = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LISTEN_SECONDS
        return self._rendezvous.hear() is not None


def _together(rendezvous: Rendezvous, function: Callable[[], _Result]) -> _Result:
    """Calls `function` on every rank; if it fails on any, raises on all: there the error itself, elsewhere one that quotes it."""
    error: Exception | None = None
    try:
        result = function()
    except (ConfigurationError, ConfigurationTypeError) as refused:
        error = refused
    except CommunicationError as failed:
        rendezvous.cry(type(failed).__name__, str(failed))  # so that nobody goes on waiting within libnccl for this rank
        first = rendezvous.hear() or Distress(rendezvous.rank, "", str(failed))
        error = TransportUnavailableError(f"transport nccl can't be started on rank {first.rank}: {first.message}")
        error.__cause__ = failed
    worked, reason = rendezvous.minimum(int(error is None), f"rank {rendezvous.rank}: {error}")
    if error is not None:
        raise error
    if not worked:
        raise TransportUnavailableError(f"transport nccl can't be started on every rank; {reason}")
    return result
