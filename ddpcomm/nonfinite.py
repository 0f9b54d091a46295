"""Gradients that are not finite: found before they are sent and in their averages, and dealt with alike on all ranks.

Each rank looks at its own gradients in the bucket that is about to go out, and says in the last bucket's status words whether all were
finite: no collective is added. The averages are looked at as well, for a sum may overflow where no summand did; all ranks hold the same
bits of them, and so find the same. Only when a status word says so do the ranks tell each other what they found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.errors import ConfigurationError, NonFiniteGradientError
from ddpcomm.listing import listed
from ddpcomm.status import Notice, Status

if TYPE_CHECKING:
    from ddpcomm.buckets import Bucket
    from ddpcomm.reducer import Reducer
    from ddpcomm.reduction import Reduction

NonFinite = Literal["ignore", "raise", "skip"]
_CHOICES = get_args(NonFinite)
_log = logging.getLogger(__name__)


def check_choice(nonfinite: object) -> None:
    """
    Raises:
        ConfigurationError: it is not one of the three.
    """
    if nonfinite not in _CHOICES:
        raise ConfigurationError(f'nonfinite must be "ignore", "raise" or "skip", got {nonfinite!r}')


class Finding(NamedTuple):
    """A parameter whose gradient is not finite: its name, and what was found where."""

    name: str
    what: str


class Screen:
    """What one reduction finds on this rank.

    Args:
        at_once: judge each bucket as it goes out, as on the CPU. Else the host doesn't wait for the device: figures stay there until a
            status word asks for them; which parameters of a bucket it was is then told by their averages.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._own: list[Finding] = []
        self._after_hook: list[Finding] = []
        self._counts: list[tuple[Bucket, Tensor]] = []

    # ---- before the averages are there ------------------------------------------------------------------------------

    def look(self, bucket: Bucket, *, after_hook: bool = False) -> None:
        """At what a bucket holds: this rank's own gradients, packed, or what a communication hook has made of them."""
        if not bucket.slots:
            return
        count = bucket.count_nonfinite()
        if not self._at_once:
            self._counts.append((bucket, count))
        elif count:
            (self._after_hook if after_hook else self._own).extend(_found_in(bucket))

    def look_at_sparse(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """At sparse gradients of this rank's own."""
        self._own += _found_in_sparse(named)

    def tell(self, bucket: Bucket) -> None:
        """Sets the status word of the last bucket, which is packed and about to be sent."""
        word = bucket.status[Notice.NONFINITE]
        if self._own or self._after_hook:
            word.fill_(1.0)
        elif self._counts:
            word.copy_(torch.stack([count.to(word.device) for _, count in self._counts]).sum() != 0)

    # ---- afterwards -------------------------------------------------------------------------------------------------

    def findings(self) -> tuple[list[Finding], list[Finding]]:
        """This rank's: of its own gradients, and of what a communication hook made of them."""
        on_device = [finding for bucket, count in self._counts if count != 0 for finding in _found_in(bucket)]
        return self._own + on_device, self._after_hook


def hear(reducer: Reducer, reduction: Reduction, status: Status) -> str:
    """What is not finite in a reduction whose buckets have all come back; the same on all ranks. Empty if all is finite.

    Collective, if `status` says that some rank found something.
    """
    screen = reduction.screen
    if screen is None:
        return ""
    if Notice.NONFINITE in status:
        told = all_gather_objects(reducer.communicator, screen.findings())
        lines = _by_rank([own for own, _ in told]) or _by_rank([after for _, after in told])
    else:
        lines = _of_sum([finding for bucket in reduction.averaged_buckets() if bucket.count_nonfinite() for finding in _found_in(bucket)])
    if lines:
        reduction.drop()
    return lines


def hear_sparse(reduction: Reduction, named: Sequence[tuple[str, Tensor]]) -> str:
    """The same for averaged sparse gradients, which are in place already. Local."""
    return "" if reduction.screen is None else _of_sum(_found_in_sparse(named))


def refuse(reducer: Reducer, lines: str, *, void: bool) -> None:
    """Makes nothing of this step, on all ranks.

    Args:
        reducer: whose step.
        lines: what was found.
        void: this rank took part for the others' sake; its own gradients stay as they are.

    Raises:
        NonFiniteGradientError: if that is what the user chose.
    """
    if reducer.options.nonfinite == "raise":
        raise NonFiniteGradientError(
            f"gradients are not finite: {lines}. The gradients of this step are void on all ranks: clear them (zero_grad), and go on with "
            'another batch, a lower learning rate or a lower loss scale; nonfinite="skip" does so by itself'
        )
    reducer.skip_step(void=void)
    if reducer.communicator.rank == 0:
        _log.warning("step skipped on all ranks, its gradients are not finite: %s", lines)


def _by_rank(told: Sequence[Sequence[Finding]]) -> str:
    return listed([f"{name} on rank {rank} ({what})" for rank, found in enumerate(told) for name, what in found], "; ")


def _of_sum(found: Sequence[Finding]) -> str:
    lines = [f"{name} ({what}), which came from the sum itself: every rank's own gradient was finite" for name, what in found]
    return listed(lines, "; ")


def _found_in(bucket: Bucket) -> list[Finding]:
    found = []
    for slot, member in zip(bucket.slots, bucket.members, strict=True):
        kind = _kind(bucket.buffer.narrow(0, slot.offset, slot.numel))
        if kind:
            found.append(Finding(member.name, f"{kind}, bucket {bucket.layout.index}"))
    return found


def _found_in_sparse(named: Iterable[tuple[str, Tensor]]) -> list[Finding]:
    kinds = [(name, _kind(gradient._values() if gradient.is_sparse else gradient)) for name, gradient in named]
    return [Finding(name, f"{kind}, sparse") for name, kind in kinds if kind]


def _kind(values: Tensor) -> str:
    values = values.detach()
    if bool(torch.isfinite(values).all()):
        return ""
    kinds = [kind for kind, test in (("nan", torch.isnan), ("inf", torch.isinf)) if bool(test(values).any())]
    return " and ".join(kinds)
