"""All buckets of a reducer at one time: made from the parameters, laid out in a given order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpcomm.buckets import Bucket
from ddpcomm.comm.base import Communicator
from ddpcomm.layout import Caps, ParameterSize, assign, plan
from ddpcomm.layout_check import headers
from ddpcomm.parameters import ManagedParameter
from ddpcomm.status import STATUS_NUMEL


class Arrangement:
    """Buckets in launch order, and where to find each parameter.

    Args:
        managed: the trainable parameters.
        order: indices of the parameters to lay out, in the order in which gradients become ready. Sparse ones are left out.
        caps: bucket sizes.
        communicator: gives the buffers.
        wire_dtype: reduce floating-point gradients in this dtype; None means in their own.
        apart: used flags and status travel in a bucket of their own, and gradients are packed, as communication hooks expect.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        order: Sequence[int],
        caps: Caps,
        communicator: Communicator,
        *,
        wire_dtype: torch.dtype | None = None,
        apart: bool = False,
    ) -> None:
        dense = [index for index in order if not managed[index].sparse]
        self.sparse = [index for index in order if managed[index].sparse]
        sizes = [m.size(wire_dtype) for m in managed]
        control = ParameterSize(0, 4, (communicator.device, torch.float32, False))
        layouts = plan(sizes, assign(sizes, dense, caps), STATUS_NUMEL, control=control, flags_apart=dense if apart else None)
        self.buckets = [Bucket(layout, managed, communicator, *layout.kind[:2]) for layout in layouts]  # type: ignore[index]  # kind is a tuple
        Bucket.introduce(self.buckets)
        self.headers = headers(self.buckets)
        """Of each bucket's all-reduce."""
        self.native_format = all(bucket.native_format for bucket in self.buckets)
        """Whether gradients travel as they are."""
        outside = len(self.buckets)
        self.bucket_of = [outside] * len(managed)
        for bucket in self.buckets:
            for slot in bucket.slots:
                self.bucket_of[slot.parameter] = bucket.layout.index
        self.counts = [len(bucket.slots) for bucket in self.buckets] + [len(managed) + 1]
        """How many gradients each bucket waits for. The last entry stands for no bucket at all and never runs out."""

    @property
    def last(self) -> int:
        return len(self.buckets) - 1

    def take_over(self, former: Arrangement) -> None:
        """Moves gradients that are views of `former`'s buckets into these, so that its memory is free."""
        own = {id(p): view for b in self.buckets for p, view in zip(b.parameters, b.views, strict=True) if b.native_format}
        for bucket in self.buckets:
            bucket.hand_out_views()
        for bucket in former.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is view:
                    target = own.get(id(parameter))
                    fits = target is not None and target.dtype == view.dtype and target.shape == view.shape
                    parameter.grad = target.copy_(view) if target is not None and fits else view.clone()

    def close(self) -> None:
        """Lets go of the buckets' memory. Idempotent."""
        for bucket in self.buckets:
            bucket.close()

    def in_buckets(self) -> list[int]:
        """The parameters whose gradient lies in a bucket."""
        return [
            slot.parameter
            for bucket in self.buckets
            for slot, parameter, view in zip(bucket.slots, bucket.parameters, bucket.views, strict=True)
            if parameter.grad is view
        ]

    def names(self, index: int) -> str:
        """The parameters of a bucket, for messages."""
        members = [m.name for m in self.buckets[index].members]
        return ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
