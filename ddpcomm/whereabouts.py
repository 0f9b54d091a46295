"""Where a rank is in training, as the others are told when they wait for it in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpcomm.mode import Mode

if TYPE_CHECKING:
    from ddpcomm.reducer import Reducer

MOST_NAMES = 10
CONSTRUCTION, FORWARD, OWN_CODE = "construction", "forward", "code outside of forward and backward"


@dataclass(frozen=True)
class Whereabouts:
    """One rank's place.

    Args:
        phase: outside of backward: construction, forward, or code of its own.
        backwards: how many backwards that synchronise it has begun.
        sent, buckets: of the backward under way, how many buckets have gone out, and of how many; 0 buckets outside of one.
        waits_for: the bucket whose all-reduce it waits for.
        missing: names of parameters that bucket `sent` waits for, at most `MOST_NAMES`.
        more_missing: how many there are beyond those.
    """

    phase: str = CONSTRUCTION
    backwards: int = 0
    sent: int = 0
    buckets: int = 0
    waits_for: int | None = None
    missing: Sequence[str] = field(default=())
    more_missing: int = 0

    def is_behind(self, other: Whereabouts) -> bool:
        """Whether this rank has got less far than the other."""
        return self._progress() < other._progress()

    def _progress(self) -> tuple[int, ...]:
        if self.phase == CONSTRUCTION:
            return (-1,)
        if self.buckets:
            return self.backwards, 0, self.sent
        return self.backwards, 1, int(self.phase == FORWARD)

    def __str__(self) -> str:
        if not self.buckets:
            return f"was in {self.phase}" + (f", after {self.backwards} backwards" if self.phase != CONSTRUCTION else "")
        text = f"was in backward {self.backwards}, had sent {self.sent} of {self.buckets} buckets"
        if self.waits_for is not None:
            return f"{text} and waited for bucket {self.waits_for}"
        if not self.missing:
            return text
        more = f" and {self.more_missing} more" if self.more_missing else ""
        return f"{text}; bucket {self.sent} lacked the gradients of {', '.join(self.missing)}{more}"


def whereabouts(reducer: Reducer, phase: str) -> Whereabouts:
    """Read off what the reducer keeps anyway, from any thread. Costs the hot path nothing."""
    reduction = reducer.under_way
    if reducer.mode is Mode.IDLE or reduction is None:
        return Whereabouts(phase, reducer.backwards)
    arrangement, sent = reduction.arrangement, reduction.next
    missing: list[str] = []
    if reduction.waits_for is None:
        fires, managed = reducer.countdown.fires(), reducer.parameters.managed
        of_bucket = arrangement.bucket_of
        lacking = [index for index, (bucket, count) in enumerate(zip(of_bucket, fires, strict=False)) if bucket == sent and not count]
        missing = [managed[index].name for index in lacking if index < len(managed)]
    return Whereabouts(
        phase,
        reducer.backwards,
        sent,
        len(arrangement.buckets),
        reduction.waits_for,
        tuple(missing[:MOST_NAMES]),
        max(len(missing) - MOST_NAMES, 0),
    )
