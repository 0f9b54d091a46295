"""The memory of one bucket: its buffer, taken from the communicator, and the way of gradients into it and out of it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddpcomm import ops
from ddpcomm._native import GradientTable
from ddpcomm.comm.base import Communicator
from ddpcomm.layout import BucketLayout
from ddpcomm.memory import has_memory
from ddpcomm.native import DTYPES, reader
from ddpcomm.parameters import ManagedParameter, gradient_dtype

LEAST_LEFT_BYTES = 64 << 10
"""Gradients from this size on may stay where they are while others read the rest of their bucket. Keeping track of one takes about a
microsecond."""


_NO_DTYPE = (255, 0)


@dataclass(frozen=True)
class Misfit:
    """A gradient that can't go into its slot: sparse, or of another dtype, device or shape than the parameter was laid out with, or a
    stray, which lies in the memory of a bucket but not in its own slot, where other gradients are written over it."""

    parameter: int
    sparse: bool = False
    stray: bool = False


class Bucket:
    """One bucket of a reducer.

    Args:
        layout: where everything lies.
        managed: all parameters, by the indices that the layout uses.
        communicator: gives the memory.
        device, dtype: of the buffer. A dtype other than the gradients' own is the format on the wire: gradients are cast on the way.
        own_buffer: whether the buffer comes from the communicator, to be reduced in place, or is plain memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        managed: Sequence[ManagedParameter],
        communicator: Communicator,
        device: torch.device,
        dtype: torch.dtype,
        own_buffer: bool = True,
    ) -> None:
        self.layout = layout
        self.device = device
        self.dtype = dtype
        make = communicator.empty if own_buffer else _plain
        self.buffer = make(layout.total_numel, dtype).zero_()
        self.slots = layout.slots
        self.members = [managed[slot.parameter] for slot in self.slots]
        self.parameters = [m.parameter for m in self.members]
        self.views = [self._view(position) for position in range(len(self.slots))]
        self.native_format = all(m.bucket_dtype == dtype for m in self.members)
        self.status = self.buffer.narrow(0, layout.status_offset, layout.status_numel)
        self.flags = self.buffer.narrow(0, layout.flags_offset, len(layout.flagged))
        self._words: dict[tuple[float, ...], Tensor] = {}
        self._ones = torch.ones(len(layout.flagged), dtype=dtype, device=device)
        self._plan = ops.FlattenPlan(
            [slot.numel for slot in self.slots] + [len(layout.flagged), layout.status_numel],
            [slot.offset for slot in self.slots] + [layout.flags_offset, layout.status_offset],
            layout.total_numel,
            dtype,
            device,
        )
        self._table = GradientTable(reader, self.parameters, self.views, [DTYPES.get(m.dtype, _NO_DTYPE) for m in self.members])
        self._gradients: list[Tensor | None] = []
        self._odd: frozenset[int] = frozenset()

    # ---- in ---------------------------------------------------------------------------------------------------------

    def gather(self) -> tuple[list[Tensor | None], list[Misfit], list[int]]:
        """Looks at every parameter's `.grad`.

        Returns:
            What is to be flattened, by slot (what lies in the bucket already among it); what doesn't fit, and is left out; and the
            parameters that have none. Autograd reports those as well, where a function returned no gradient for them.
        """
        gradients, odd, strays = self._table.gather()
        self._gradients, self._odd = gradients, frozenset(odd)
        if not odd and not strays:
            return gradients, [], []
        sources = list(gradients)
        misfits: list[Misfit] = []
        absent: list[int] = []
        for position in odd:
            self._keep_in_place(position)
            gradient, view = self.parameters[position].grad, self.views[position]
            gradients[position] = gradient
            if gradient is None:
                absent.append(self.slots[position].parameter)
            elif _fits(gradient, self.members[position], view):
                sources[position] = _in_memory_order(gradient, view)
            else:
                misfits.append(Misfit(self.slots[position].parameter, sparse=gradient.layout is not torch.strided))
                sources[position] = None
        for position in strays:
            misfits.append(Misfit(self.slots[position].parameter, stray=True))
            sources[position] = None
        return sources, misfits, absent

    @staticmethod
    def introduce(buckets: Sequence[Bucket]) -> None:
        """Tells buckets of each other: in their memory no gradient may lie but in its own slot."""
        places = [(bucket.buffer.data_ptr(), bucket.buffer.nbytes) for bucket in buckets]
        GradientTable.know_buckets([bucket._table for bucket in buckets], places)

    def _view(self, position: int) -> Tensor:
        """A slot in the shape that the parameter was laid out with and, where that is dense, with its strides."""
        slot, member = self.slots[position], self.members[position]
        raw = self.buffer.narrow(0, slot.offset, slot.numel)
        data = torch.view_as_complex(raw.view(-1, 2)) if member.dtype.is_complex else raw
        like = torch.empty_strided(member.shape, member.strides, device="meta")
        strides = torch.empty_like(like, memory_format=torch.preserve_format).stride()
        return data.as_strided(member.shape, strides, data.storage_offset())

    def _keep_in_place(self, position: int) -> None:
        """Lays a view into the bucket again. Casting or moving a module gives other memory to the tensors that are its gradients: what it
        holds then becomes the parameter's own gradient."""
        view, slot, parameter = self.views[position], self.slots[position], self.parameters[position]
        if slot.numel == 0 or view.data_ptr() == self.buffer.data_ptr() + slot.offset * self.dtype.itemsize:
            return
        if parameter.grad is view:
            parameter.grad = view.detach()
        view.data = self._view(position)

    def pack(self, sources: Sequence[Tensor | None], used: Sequence[bool] | None, words: tuple[float, ...], scale: float) -> None:
        """Flattens in one pass.

        Args:
            sources: from `gather`.
            used: the used flag of each parameter in `layout.flagged`; None means all of them.
            words: the status words, in the bucket that carries them.
            scale: everything is multiplied by it.
        """
        self._plan.flatten([*sources, *self._tail(used, words)], self.buffer, scale)

    def pack_around(
        self, sources: Sequence[Tensor | None], used: Sequence[bool] | None, words: tuple[float, ...], skipped: range
    ) -> list[tuple[int, int, int, int]]:
        """As `pack` with scale 1, but what large gradients have in a range of the buffer may be left where it is: (slot, first element in
        the buffer, count, address) of each such part."""
        gradients = range(skipped.start, max(skipped.start, min(skipped.stop, self.layout.flags_offset)))  # flags and words are made here
        return self._plan.flatten_around([*sources, *self._tail(used, words)], self.buffer, gradients, LEAST_LEFT_BYTES)

    def _tail(self, used: Sequence[bool] | None, words: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        flags = self._ones if used is None else torch.tensor(used, dtype=self.dtype, device=self.device)
        if words not in self._words:  # nearly always the same ones
            self._words[words] = torch.tensor(words, dtype=self.dtype, device=self.device)
        return flags, self._words[words]

    # ---- out --------------------------------------------------------------------------------------------------------

    def keep_unused(self, used: Sequence[bool]) -> list[tuple[int, Tensor]]:
        """Copies of what lies in the bucket for parameters that this rank didn't use: if no rank did, it goes back as it was."""
        return [
            (position, view.clone())
            for position, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True))
            if not used[position] and parameter.grad is view
        ]

    def used_by_some_rank(self) -> list[bool]:
        """The reduced flags of the parameters in `layout.flagged`. On CUDA the host waits for them."""
        return [flag != 0 for flag in self.flags.tolist()]

    @staticmethod
    def overlapping(buckets: Sequence[Bucket]) -> list[list[int]]:
        """By bucket, the positions whose gradients, as `gather` saw them, have memory in common with another one, or with themselves."""
        return GradientTable.overlapping([bucket._table for bucket in buckets])

    def unpack(self, used: Sequence[bool], as_view: bool, apart: Set[int] = frozenset()) -> None:
        """Gives every used parameter its average, as a view of the bucket or in its own tensor; a missing one is made.

        Args:
            used: by slot, whether some rank used the parameter.
            as_view: `.grad` becomes the bucket's memory.
            apart: positions that get a new tensor, because what is written to theirs would be written to others' too. Autograd makes such
                gradients: those of p and q in `p.view(-1) + q.view(-1)` are one.
        """
        if as_view and self.native_format:
            self._table.assign_views(self._gradients, used)
            return
        if not self._odd and not apart and all(used):  # nothing is missing, and all is as it is laid out
            self._plan.unflatten(self.buffer, [*self._gradients, None, None])
            return
        targets: list[Tensor | None] = []
        rest: list[int] = []
        for position, gradient in enumerate(self._gradients):
            plain = gradient is not None and used[position] and position not in self._odd and position not in apart
            targets.append(gradient if plain else None)
            if used[position] and not plain:
                rest.append(position)
        self._plan.unflatten(self.buffer, [*targets, None, None])
        for position in rest:
            parameter, view = self.parameters[position], self.views[position]
            if parameter.grad is None or position in apart:
                parameter.grad = torch.empty_strided(view.shape, view.stride(), dtype=gradient_dtype(parameter), device=parameter.device)
            with torch.no_grad():
                parameter.grad.copy_(view)

    def count_nonfinite(self) -> Tensor:
        """How many values of the gradients that the buffer holds are not finite: one float64 on its device."""
        statistics = torch.empty(2, dtype=torch.float64, device=self.device)
        self._data_plan.norm(self.buffer, statistics)
        return statistics[1]

    @cached_property
    def _data_plan(self) -> ops.FlattenPlan:
        """Of the gradients alone, without flags and status."""
        numels, offsets = [slot.numel for slot in self.slots], [slot.offset for slot in self.slots]
        return ops.FlattenPlan(numels, offsets, self.layout.total_numel, self.dtype, self.device)

    def hand_out_views(self) -> None:
        """Gradients are views of this bucket before it has been unpacked."""
        self._table.hand_out()

    def forget(self) -> None:
        """Lets go of the gradients that `gather` saw, so that they can be freed."""
        self._gradients = []

    def close(self) -> None:
        """Lets go of the memory, which stays as long as gradients are views of it. What is known of the layout stays, too. Idempotent."""
        self.buffer = self.status = self.flags = self.buffer.new_empty(0)
        self.views = []
        self._gradients = []
        self._table = GradientTable(reader, [], [], [])

    def lost(self) -> list[int]:
        """The parameters whose `.grad` is no longer what `gather` saw."""
        return [self.slots[position].parameter for position in self._table.changed(self._gradients)]


def _plain(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def _fits(gradient: Tensor, member: ManagedParameter, view: Tensor) -> bool:
    return (
        gradient.layout is torch.strided
        and has_memory(gradient)
        and gradient.dtype is member.dtype
        and gradient.device == view.device
        and gradient.shape == view.shape
    )


def _in_memory_order(gradient: Tensor, view: Tensor) -> Tensor:
    """The gradient's elements in the order in which the slot holds them: itself where its strides agree, else a copy."""
    if gradient.is_complex():
        gradient = gradient.resolve_conj()
    if gradient.is_neg():
        gradient = gradient.resolve_neg()
    if not (gradient.is_contiguous() and view.is_contiguous()) and not _same_order(gradient, view):
        gradient = torch.empty_strided(view.shape, view.stride(), dtype=gradient.dtype, device=gradient.device).copy_(gradient.detach())
    return torch.view_as_real(gradient.detach()) if gradient.is_complex() else gradient


def _same_order(gradient: Tensor, view: Tensor) -> bool:
    """Whether both run through memory alike; the stride of a dimension of size 1 is never taken."""
    pairs = zip(gradient.shape, gradient.stride(), view.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in pairs)
