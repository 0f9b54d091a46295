"""Copies of a wrapped model: pickled, or deep in memory."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any, TypeVar

from torch import nn

from ddpcomm.arguments import Placement
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.factory import create_communicator
from ddpcomm.comm.process_group import resolve
from ddpcomm.comm.torch_ddp import ProcessGroup, all_groups, default_group
from ddpcomm.errors import ConfigurationError
from ddpcomm.reports import Reporter
from ddpcomm.status import TAGS

_NOT_COPIED = frozenset(
    {"process_group", "device_mesh", "_communicator", "_reducer", "_module_buffers", "_statistics", "_finalizer", "_guard", "_reports"}
    | {"_optimizer_hooks_seen"}
)
_Model = TypeVar("_Model", bound="Copies")


class Copies(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    process_group: ProcessGroup
    _communicator: Communicator
    _placement: Placement
    _tag: int
    _shares_communicator: bool
    _timeout: timedelta | None
    _reports: Reporter

    def _start(self, *, check_plan: bool) -> None:
        """What can't be copied or pickled. Local."""
        raise AttributeError("_start")

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not default_group():
            raise ConfigurationError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, when you have called "
                "init_process_group and have not passed process_group argument to DDP constructor"
            )
        return self._copied_state()

    def _copied_state(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = resolve(None)
        self._shares_communicator = False
        # Loading is local, maybe on one rank alone: only this transport needs nobody else to be made.
        self._take_up(create_communicator(self.process_group, self._placement.device, "process_group", self._timeout))

    def __deepcopy__(self: _Model, memo: dict[int, Any]) -> _Model:
        twin = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        memo[id(self)] = twin
        memo.update((id(group), group) for group in all_groups())  # a hook's state may hold one
        twin.__dict__.update(copy.deepcopy(self._copied_state(), memo))
        twin.process_group = self.process_group
        if hasattr(self, "device_mesh"):
            twin.device_mesh = self.device_mesh
        twin._tag = (self._tag + 1) % TAGS
        self._shares_communicator = twin._shares_communicator = True
        twin._take_up(self._communicator)
        return twin

    def _take_up(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._reports = Reporter()  # perhaps on one rank alone: there is no board to share
        self._start(check_plan=False)
