"""Uneven inputs: ranks that have run out shadow what the others do. Over torch's own `Join` context manager."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddpcomm.comm.base import Communicator

__all__ = ["Join", "JoinHook", "Joinable", "Participation", "ShadowHook", "Shadowed", "notify", "tell"]


class Participation:
    """Who takes part in an iteration, by rank.

    Args:
        active: whether each rank still has input.
        synchronizes: whether each rank's backward is going to synchronise.
        syncs_buffers: whether each rank is about to synchronise its buffers.
    """

    def __init__(self, active: list[bool], synchronizes: list[bool], syncs_buffers: list[bool]) -> None:
        self.active_ranks = sum(active)
        self.synchronizes = any(synchronizes)
        self.syncs_buffers = any(syncs_buffers)
        self.authoritative_rank = max((rank for rank, is_active in enumerate(active) if is_active), default=0)
        """Whose buffers count: the highest rank that still has input."""


def tell(communicator: Communicator, *, active: bool, synchronizes: bool = False, syncs_buffers: bool = False) -> Participation:
    """What this rank does in this iteration, to all ranks, and theirs. Collective: one all-gather of three numbers."""
    mine = torch.tensor([active, synchronizes, syncs_buffers], dtype=torch.int64, device=communicator.device)
    everyone = mine.new_empty(len(mine) * communicator.world_size)
    communicator.all_gather(everyone, mine).wait()
    actives, synchronizing, syncing = everyone.view(-1, len(mine)).bool().t().tolist()
    return Participation(actives, synchronizing, syncing)


def notify(joinable: Joinable) -> None:
    """Tells the context manager that this rank still has input. Collective within `join()`, nothing outside.

    Raises:
        RuntimeError: some rank has run out, and the user asked for an error then.
    """
    Join.notify_join_context(joinable)


class Shadowed(Protocol):
    """What a model must offer to be shadowed."""

    def shadow_iteration(self) -> None:
        """Takes part in one forward and backward of the other ranks."""

    def take_final_state(self, is_last_joiner: bool) -> None:
        """Takes over the model of a rank that ran out last."""


class ShadowHook(JoinHook):
    """Torch's interface to `Shadowed`."""

    def __init__(self, model: Shadowed) -> None:
        self._model = model

    def main_hook(self) -> None:
        self._model.shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._model.take_final_state(is_last_joiner)
