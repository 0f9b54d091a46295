"""Which parameter goes where in which bucket: planning on integers alone.

A bucket is one contiguous buffer of one kind (device and dtype). In it lie, in this order:

    gradients            each at an offset that is a multiple of ALIGNMENT_BYTES, unless the layout is packed
    used flags           one element a parameter: not 0 where some rank used the parameter
    status words         in the last bucket alone: what the ranks have to tell each other at the end of a backward

Buckets are numbered in the order in which they go out, the same on every rank. That order follows the order in which gradients become
ready (Li et al., arXiv 2006.15704, section 3.2.3): a bucket goes out with the last of its gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64  # a cache line, and four 128-bit accesses: copies are vectorised
FIRST_BUCKET_BYTES = 1024 * 1024
DEFAULT_BUCKET_MB = 25
BYTES_PER_MB = 1024 * 1024


@dataclass(frozen=True)
class ParameterSize:
    """What the layout needs to know of a parameter.

    Args:
        numel: how many real elements its gradient has; a complex one counts as two.
        element_bytes: the size of one of them in the bucket.
        kind: parameters of different kinds (device, dtype) never share a bucket.
    """

    numel: int
    element_bytes: int
    kind: Hashable


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket, in elements."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """One bucket. `flagged` are the parameters whose used flags it carries, at `flags_offset` and on.

    `data_numel` counts the elements up to the end of the last gradient, `total_numel` all of them.
    """

    index: int
    kind: Hashable
    slots: tuple[Slot, ...]
    data_numel: int
    flags_offset: int
    flagged: tuple[int, ...]
    status_offset: int
    status_numel: int
    total_numel: int

    @property
    def has_status(self) -> bool:
        return self.status_numel > 0


@dataclass(frozen=True)
class Caps:
    """Where buckets end.

    Args:
        bytes: the n-th bucket of a kind closes once it holds `bytes[n]` or more, the last entry goes on for ever.
        ends: explicit boundaries in the sizes' place: every open bucket closes after each of these parameters, and nowhere else. They name
            parameters and not positions, so that they stay where they are when others are left out.
    """

    bytes: tuple[int, ...]
    ends: frozenset[int] | None = None

    def of(self, number: int) -> int:
        return self.bytes[min(number, len(self.bytes) - 1)]

    @classmethod
    def of_mb(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None = None) -> Caps:
        """torch's arguments `bucket_cap_mb` and `bucket_cap_mb_list` (MiB). The small first bucket belongs to the default alone."""
        if cap_mb_list:
            return cls(tuple(int(cap * BYTES_PER_MB) for cap in cap_mb_list))
        if cap_mb is None:
            return cls((FIRST_BUCKET_BYTES, DEFAULT_BUCKET_MB * BYTES_PER_MB))
        return cls((int(cap_mb * BYTES_PER_MB),))


def assign(sizes: Sequence[ParameterSize], order: Sequence[int], caps: Caps) -> list[list[int]]:
    """Parameters by bucket.

    Args:
        sizes: of every parameter.
        order: the parameters to lay out, in the order in which their gradients become ready.
        caps: where buckets end.

    Returns:
        The buckets in launch order, each with its parameters in ready order.
    """
    filled: dict[Hashable, list[list[int]]] = {}
    open_bytes: dict[Hashable, int] = {}
    for parameter in order:
        size = sizes[parameter]
        buckets = filled.setdefault(size.kind, [[]])
        size_bytes = size.numel * size.element_bytes
        if caps.ends is None and buckets[-1] and open_bytes[size.kind] >= caps.of(len(buckets) - 1):
            buckets.append([])
        if not buckets[-1]:
            open_bytes[size.kind] = 0
        buckets[-1].append(parameter)
        open_bytes[size.kind] += size_bytes
        if caps.ends is not None and parameter in caps.ends:
            for of_kind in filled.values():
                if of_kind[-1]:
                    of_kind.append([])
    ready = {parameter: position for position, parameter in enumerate(order)}
    return sorted((bucket for buckets in filled.values() for bucket in buckets if bucket), key=lambda bucket: ready[bucket[-1]])


def plan(
    sizes: Sequence[ParameterSize],
    buckets: Sequence[Sequence[int]],
    status_numel: int,
    *,
    control: ParameterSize,
    flags_apart: Sequence[int] | None = None,
) -> tuple[BucketLayout, ...]:
    """Places every parameter, used flag and status word.

    Args:
        sizes: of every parameter.
        buckets: what `assign` returned.
        status_numel: how many status words the last bucket carries.
        control: kind and element size of the bucket that carries flags and status alone, where one is needed.
        flags_apart: None puts flags and status at the tails. Else the gradients are packed, nothing stands beside them (as
            communication hooks expect), and a last bucket carries the flags of these parameters and the status.

    Returns:
        The buckets in launch order; the last one carries the status words.
    """
    needs_control = flags_apart is not None or not buckets
    placed = []
    for index, parameters in enumerate(buckets):
        last = index == len(buckets) - 1 and not needs_control
        placed.append(
            _place(
                index,
                sizes[parameters[0]],
                [(p, sizes[p].numel) for p in parameters],
                flagged=parameters if flags_apart is None else (),
                status_numel=status_numel if last else 0,
                packed=flags_apart is not None,
            )
        )
    if needs_control:
        placed.append(_place(len(placed), control, [], flagged=flags_apart or (), status_numel=status_numel, packed=False))
    return tuple(placed)


def _place(
    index: int, size: ParameterSize, numels: Sequence[tuple[int, int]], *, flagged: Sequence[int], status_numel: int, packed: bool
) -> BucketLayout:
    step = 1 if packed else max(1, ALIGNMENT_BYTES // size.element_bytes)
    slots, end = [], 0
    for parameter, numel in numels:
        offset = _round_up(end, step)
        slots.append(Slot(parameter, offset, numel))
        end = offset + numel
    flags_offset = _round_up(end, step) if flagged or status_numel else end
    status_offset = flags_offset + len(flagged)
    return BucketLayout(
        index=index,
        kind=size.kind,
        slots=tuple(slots),
        data_numel=end,
        flags_offset=flags_offset,
        flagged=tuple(flagged),
        status_offset=status_offset,
        status_numel=status_numel,
        total_numel=status_offset + status_numel,
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
