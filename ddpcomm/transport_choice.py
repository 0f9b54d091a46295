"""`transport=` and `transport_options=`: how a model's communicator is made, and which of its options are left to measurement."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from torch import nn

from ddpcomm.arguments import Placement
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.factory import TRANSPORTS, create_communicator, require_same_transport
from ddpcomm.comm.torch_ddp import ProcessGroup
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.reducer import Reducer
from ddpcomm.tuning import Plan

AUTO = "auto"
CANDIDATES: Mapping[str, tuple[int, ...]] = MappingProxyType({"communicators": (2, 4), "max_ctas": (16, 8, 4)})
"""What is tried for each option that can be "auto", in this order, beside what the transport does by itself. Both are options of nccl: the
paper's round robin over several communicators, and the most of the device's processors that a collective may take from backward."""

_ARGUMENTS = frozenset({"process_group", "device", "transport", "timeout"})
"""Of `create_communicator`, and no transport's options."""


class TransportChoice(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    process_group: ProcessGroup
    _placement: Placement
    _communicator: Communicator
    _reducer: Reducer
    _transport: str
    _transport_options: dict[str, Any]
    _timeout: timedelta | None
    _shares_communicator: bool
    _tunes_options: bool

    def _take_transport(self, transport: str, options: Mapping[str, Any] | None) -> None:
        """Reads the constructor's arguments.

        Raises:
            ConfigurationTypeError: the options are no mapping of names.
            ConfigurationError: options for a transport that isn't named, or "auto" for one that can't be measured here, or what is not
                for them to say.
        """
        if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
            raise ConfigurationTypeError(f"transport_options must map names of options to their values, got {options!r}")
        misplaced = sorted(_ARGUMENTS.intersection(options or ()))
        if misplaced:
            raise ConfigurationError(
                f"transport_options can't hold {', '.join(misplaced)}: these are arguments of their own, or the module's"
            )
        if transport not in TRANSPORTS[:-1]:
            nothing = ", which moves no data" if transport == "fake" else ""
            raise ConfigurationError(f"transport must be one of {', '.join(TRANSPORTS[:-1])}, got {transport!r}{nothing}")
        self._transport, self._transport_options = transport, dict(options or {})
        self._shares_communicator = False
        self._tunes_options = bool(self._undecided)
        if options and transport == AUTO:
            raise ConfigurationError(f'transport_options need a transport that is named, not "auto"; got {dict(options)!r}')
        if self._undecided and transport != "nccl":
            raise ConfigurationError(f'{", ".join(self._undecided)} can be "auto" for transport="nccl" alone, not for {transport!r}')

    @property
    def _undecided(self) -> list[str]:
        """The options that measurements are to choose."""
        return [name for name in CANDIDATES if self._transport_options.get(name) == AUTO]

    def _decided_options(self, plan: Plan | None) -> dict[str, Any]:
        """The options to start with: those that are given, and for the others what a plan says or the transport does by itself."""
        undecided = self._undecided
        options = {"timeout": self._timeout} | {name: value for name, value in self._transport_options.items() if name not in undecided}
        if plan is not None:
            options.update({name: value for name in undecided if (value := getattr(plan, name)) is not None})
        return options

    def _open_communicator(self, options: Mapping[str, Any], process_group: ProcessGroup | None = None) -> Communicator:
        """Another one for the same ranks, or for those of another group. Collective."""
        decided = {**self._decided_options(None), **options}
        if process_group is not None:  # whose ranks may not have been compared yet
            require_same_transport(process_group, self._transport, decided["timeout"], self._transport_options)
        return create_communicator(process_group or self.process_group, self._placement.device, self._transport, **decided)

    def _require_same_transport(self, process_group: ProcessGroup) -> None:
        """Before any transport is set up: ranks that use different ones can't even tell each other so. Collective."""
        require_same_transport(process_group, self._transport, self._timeout, self._transport_options)

    def _switch_communicator(self, communicator: Communicator) -> None:
        """Goes on by it, over the same ranks; the former stays open. Collective where its `empty` is; no backward may be under way."""
        self._communicator = communicator
        self._reducer.switch_to(communicator)

    def _give_back_communicator(self, communicator: Communicator) -> None:
        """Closes one that is no longer used here. A copy of this model may go on using the one that both began with."""
        if not self._shares_communicator:
            communicator.close()
