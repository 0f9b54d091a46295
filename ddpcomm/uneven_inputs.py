"""Uneven inputs: `join()`, by torch's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpcomm.argument_checks import check_flag
from ddpcomm.arguments import Placement
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.join import Join, Joinable, JoinHook, ShadowHook, notify, tell
from ddpcomm.comm.torch_ddp import ProcessGroup
from ddpcomm.reducer import Reducer
from ddpcomm.reports import Reporter


class UnevenInputs(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    process_group: ProcessGroup
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    _placement: Placement
    _communicator: Communicator
    _reducer: Reducer
    _reports: Reporter
    _divide_by_initial_world_size: bool
    _join_config: Any

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False) -> Join:
        """Context manager for ranks with different numbers of batches: one that has run out takes part with zeros.

        Args:
            divide_by_initial_world_size: divide by the world size, else by the number of ranks that still have input.
            enable: False makes it do nothing.
            throw_on_early_termination: raise on every rank when the first has run out.
        """
        check_flag("divide_by_initial_world_size", divide_by_initial_world_size)
        check_flag("enable", enable)
        check_flag("throw_on_early_termination", throw_on_early_termination)
        joinables: list[Joinable] = [self]  # type: ignore[list-item]  # DistributedDataParallel is one
        return Join(joinables, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Torch's `Joinable` interface. Takes `divide_by_initial_world_size`."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self)

    @property
    def join_device(self) -> torch.device:
        """Where torch's `Join` exchanges its notes."""
        return self._placement.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Whose ranks join."""
        return self.process_group

    def _go_on(self, syncs_buffers: bool) -> int:
        """Within `join()`, says that this rank still has input. Collective there. Returns the rank whose buffers count."""
        if not self._join_config.enable:
            self._reducer.divisor = float(self._communicator.world_size)
            return 0
        notify(self)  # type: ignore[arg-type]  # DistributedDataParallel is a Joinable
        synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
        participation = tell(self._communicator, active=True, synchronizes=synchronizes, syncs_buffers=syncs_buffers)
        self._divide_by(participation.active_ranks)
        return participation.authoritative_rank

    def _divide_by(self, active_ranks: int) -> None:
        """Also on ranks that send zeros: all ranks must decide alike who divides."""
        by_all = self._divide_by_initial_world_size
        self._reducer.divisor = float(self._communicator.world_size if by_all else active_ranks)

    def shadow_iteration(self) -> None:
        """Takes part, with zeros, in a forward and backward of ranks that still have input. Collective."""
        with self._reports.watching("a shadowed step of join()"):
            self._reducer.prepare_forward()
            participation = tell(self._communicator, active=False)
            if participation.syncs_buffers:
                self._sync_buffers(participation.authoritative_rank)
            self._divide_by(participation.active_ranks)
            if participation.synchronizes:
                self._reducer.shadow()

    def take_final_state(self, is_last_joiner: bool) -> None:
        """Gives every rank the model of one that ran out last. Collective."""
        with self._reports.watching("the end of join()"):
            self._authoritative_rank = tell(self._communicator, active=is_last_joiner).authoritative_rank
            self._broadcast_state(self._authoritative_rank, with_buffers=self.forward_sync_buffers)

    def _sync_buffers(self, source: int) -> None:
        """Takes over rank `source`'s buffers."""
        raise AttributeError("_sync_buffers")

    def _broadcast_state(self, source: int = 0, *, with_buffers: bool = True) -> None:
        """Takes over rank `source`'s parameters and buffers."""
        raise AttributeError("_broadcast_state")
