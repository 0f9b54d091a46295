"""A libnccl whose collectives are Gloo's: real ranks, real data, no GPU. For all of the nccl transport but the two thin layers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ddpcomm.comm.nccl import NcclCommunicator
from ddpcomm.comm.nccl_library import IN_PROGRESS, MAXIMUM, SUM
from ddpcomm.comm.nccl_start import connect, equip
from ddpcomm.comm.rendezvous import Rendezvous
from tests.comm.recorder import Recorder, RecordingLibrary
from tests.rank_process import RankContext


class GlooLibrary(RecordingLibrary):
    """Works on the calling thread, at once, and unseen by whoever writes down torch's own kernels. Only starting takes until all ranks have
    come, as with the real one."""

    def __init__(self, recorder: Recorder, process_group: dist.ProcessGroup) -> None:
        super().__init__(recorder)
        self._group = process_group
        self._scales: dict[int, float] = {}
        self._starts = 0
        store = dist.distributed_c10d._get_process_group_store(process_group)
        self._store = dist.PrefixStore(f"library/{store.add(f'libraries/{process_group.rank()}', 1)}", store)

    def start(self, world_size: int, rank: int, unique_id: bytes, config: Mapping[str, int | str]) -> int:
        handle = super().start(world_size, rank, unique_id, config)
        self._store.add(f"started/{self._starts}", 1)
        self._starts += 1
        return handle

    def state(self, communicator: int) -> int:
        started = all(self._store.add(f"started/{number}", 0) == self._group.size() for number in range(self._starts))
        return super().state(communicator) if started else IN_PROGRESS

    def create_scaled_sum(self, communicator: int, scale: float, dtype: torch.dtype) -> int:
        operator = super().create_scaled_sum(communicator, scale, dtype)
        self._scales[operator] = scale
        return operator

    def all_reduce(self, communicator: int, tensor: Tensor, op: int, stream: Any) -> None:
        super().all_reduce(communicator, tensor, op, stream)
        with _disable_current_modes():
            self._reduce(tensor, op)

    def broadcast(self, communicator: int, tensor: Tensor, source: int, stream: Any) -> None:
        super().broadcast(communicator, tensor, source, stream)
        with _disable_current_modes():
            dist.broadcast(tensor, group_src=source, group=self._group)

    def all_gather(self, communicator: int, out: Tensor, tensor: Tensor, stream: Any) -> None:
        super().all_gather(communicator, out, tensor, stream)
        with _disable_current_modes():
            dist.all_gather(list(out.chunk(self._group.size())), tensor.clone(), group=self._group)

    def reduce_scatter(self, communicator: int, out: Tensor, tensor: Tensor, op: int, stream: Any) -> None:
        super().reduce_scatter(communicator, out, tensor, op, stream)
        with _disable_current_modes():
            whole = tensor.reshape(-1).clone()
            self._reduce(whole, op)
            out.copy_(whole.chunk(self._group.size())[self._group.rank()].view_as(out))

    def _reduce(self, tensor: Tensor, op: int) -> None:
        if op not in (SUM, MAXIMUM):
            tensor.mul_(self._scales[op])
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        dist.all_reduce(raw, dist.ReduceOp.MAX if op == MAXIMUM else dist.ReduceOp.SUM, group=self._group)


def nccl_over_gloo(
    context: RankContext, timeout: timedelta = timedelta(seconds=20), recorder: Recorder | None = None, **options: Any
) -> tuple[NcclCommunicator, Recorder]:
    """Collective. The device is idle whenever it is asked, unless the recorder says otherwise later."""
    if recorder is None:
        recorder = Recorder()
        recorder.runtime.idle = True
    library = GlooLibrary(recorder, context.process_group)
    library.__dict__.update({name: value for name, value in vars(recorder.library).items() if name in ("version", "refused", "no_handle")})
    recorder.library = library
    rendezvous = Rendezvous.of(context.process_group, "nccl", timeout)
    equipment = equip(rendezvous, torch.device("cpu"), options, library, recorder.runtime)
    return NcclCommunicator(rendezvous, equipment, connect(rendezvous, equipment, timeout), timeout), recorder
