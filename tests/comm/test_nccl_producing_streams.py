"""DistributedDataParallel over the nccl transport, where one branch of the model runs on a stream of its own.

As with CUDA, an operation's backward runs on the stream of its forward, and so do the hooks of the parameters that it reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcomm
from ddpcomm.comm.cuda_runtime import order_after
from ddpcomm.reducer import Reducer
from tests.comm.hazards import find_hazards
from tests.comm.kernels_on_streams import kernels_written_down
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.comm.recorder import RecordedStream, Recorder
from tests.rank_process import RankContext
from tests.ranks import RankPool

TWO_WEIGHTS_MB = 128 / 2**20  # the last bucket always waits for the end of the backward: the branches share the one before


class Enter(torch.autograd.Function):
    """In backward, what follows runs on `stream`. Either it uses the gradient, and waits for it, or nothing does."""

    @staticmethod
    def forward(context: Any, data: Tensor, recorder: Recorder, stream: RecordedStream, used: bool) -> Tensor:
        context.recorder, context.stream, context.used = recorder, stream, used
        return data.view_as(data)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        runtime = context.recorder.runtime
        if context.used:
            order_after(runtime, context.stream, [runtime.current_stream()], runtime.create_event())
        runtime._current.stream = context.stream
        return gradient.view_as(gradient) if context.used else None, None, None, None


class Branches(nn.Module):
    """Two branches of one input. The gradient of `side` is ready first, on its own stream, its elements in another order than in the
    bucket."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.first, self.main, self.side = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.stream = recorder.runtime.make_stream("side")
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_((torch.arange(16.0) + number).remainder(3).view(4, 4))
        self.side.weight.register_hook(lambda gradient: gradient.t().contiguous().t())

    def forward(self, data: Tensor) -> Tensor:
        data = self.first(data)
        one = self.main(data)
        other = Enter.apply(data, self.recorder, self.recorder.runtime.main, False)
        other = Enter.apply(self.side(other), self.recorder, self.stream, True)
        return one + other


def train(context: RankContext, view: bool, waits: bool) -> tuple[list[str], set[str]]:
    """The hazards, and the streams on which parameters' gradients were accumulated."""
    communicator, recorder = nccl_over_gloo(context, communicators=4)
    runtime = recorder.runtime
    seen: set[str] = set()

    def wait_for_producers(streams: Sequence[int], gradients: Sequence[Tensor | None], device: torch.device) -> None:
        known = {each.cuda_stream: each for each in (runtime.main, net.module.stream)}
        if waits:
            order_after(runtime, runtime.current_stream(), [known[number] for number in streams], runtime.create_event())

    def current_stream() -> int:
        seen.add(runtime.current_stream().name)
        return runtime.current_stream().cuda_stream

    end = Reducer._end

    def end_of_backward(self: Reducer) -> None:
        """Autograd has the caller's stream wait for all others before callbacks run at the end of a backward."""
        order_after(runtime, runtime.main, [net.module.stream], runtime.create_event())
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reducer, "_end", end_of_backward)
        patch.setattr("ddpcomm.ddp.create_communicator", lambda *arguments, **options: communicator)
        patch.setattr("ddpcomm.reducer.stream_reader", lambda device: current_stream)
        patch.setattr("ddpcomm.reduction.wait_for_producers", wait_for_producers)
        net = ddpcomm.DistributedDataParallel(
            Branches(recorder), gradient_as_bucket_view=view, bucket_cap_mb_list=[TWO_WEIGHTS_MB] * 2, init_sync=False
        )
        runtime.idle = False
        with kernels_written_down(recorder):
            for step in range(3):
                net.zero_grad()
                net((torch.arange(8.0) + step + context.rank).view(2, 4)).sum().backward()
                recorder.kernel("optimizer", reads=[parameter.grad for parameter in net.parameters()])
    found = find_hazards([entry for entry in recorder.trace if entry.stream != "host"])
    runtime.idle = True
    net.close()
    return found, seen


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_flatten_waits_for_the_streams_of_all_gradients(two_ranks: RankPool, view: bool) -> None:
    for hazards, seen in two_ranks.run(train, view, True):
        assert seen == {"main", "side"}
        assert hazards == []


def test_flatten_that_does_not_wait_is_noticed(two_ranks: RankPool) -> None:
    for hazards, _ in two_ranks.run(train, False, False):
        assert any("flatten" in hazard for hazard in hazards)
