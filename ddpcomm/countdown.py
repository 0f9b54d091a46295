"""Counts the gradients of a backward down, parameter by parameter: the one thing here that runs once for each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ddpcomm.arrangement import Arrangement


class Countdown:
    """The hooks of a reducer's parameters.

    A hook costs 0.25 us, of the 0.9 us that any post-accumulate hook in Python costs torch (two-core Xeon at 2.8 GHz). While nothing is
    armed, every gradient is reported as uncounted.

    Args:
        full: called when a bucket has all its gradients.
        uncounted: called with the parameter's index at each gradient beyond those that were expected.
    """

    def __init__(self, full: Callable[[], None], uncounted: Callable[[int], None]) -> None:
        self._full = weakref.WeakMethod(full)
        self._uncounted = weakref.WeakMethod(uncounted)
        self._handles: list[Any] = []
        # The hooks hold on to these lists: they change in place, and are never exchanged.
        self._fires_left: list[int] = []
        self._bucket_left: list[int] = []
        self._bucket_of: list[int] = []
        self._armed = False
        self.expected: list[int] = []
        """How often each parameter receives a gradient in a backward, as far as is known."""

    def attach(self, parameters: Sequence[Tensor], expected: Sequence[int]) -> None:
        """Hooks these parameters, in place of those before."""
        self.detach()
        self.expected = list(expected)
        self._fires_left[:] = [0] * len(parameters)
        for index, parameter in enumerate(parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._make_hook(index)))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Takes the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def arm(self, arrangement: Arrangement) -> None:
        """From now on the expected gradients count their buckets down."""
        self._bucket_of[:] = arrangement.bucket_of
        self._bucket_left[:] = arrangement.counts
        self._fires_left[:] = self.expected
        self._armed = True

    def rest(self) -> None:
        """Nothing is expected any more."""
        self._fires_left[:] = [0] * len(self.expected)
        self._armed = False

    def is_full(self, bucket: int) -> bool:
        """Whether a bucket has all its gradients."""
        return self._armed and self._bucket_left[bucket] == 0

    def fires(self) -> list[int]:
        """How often each parameter received a gradient since `arm` or `rest`."""
        if self._armed:
            return [expected - left for expected, left in zip(self.expected, self._fires_left, strict=True)]
        return [-left for left in self._fires_left]

    def recount(self, index: int) -> None:
        """Counts a gradient that came before the countdown was armed, and that arming forgot."""
        if not self._armed:
            self._fires_left[index] -= 1
            return
        self._count(index)

    def forget(self, index: int) -> None:
        """Takes a count back."""
        self._fires_left[index] += 1

    def _count(self, index: int) -> None:
        left = self._fires_left[index] = self._fires_left[index] - 1
        if left == 0:
            bucket = self._bucket_of[index]
            self._bucket_left[bucket] -= 1
            full = self._full()
            if self._bucket_left[bucket] == 0 and full is not None:
                full()

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        fires_left, bucket_left, bucket_of = self._fires_left, self._bucket_left, self._bucket_of
        full, uncounted = self._full, self._uncounted

        def hook(_: Tensor) -> None:
            left = fires_left[index] - 1
            fires_left[index] = left
            if left > 0:
                return
            if left == 0:
                bucket = bucket_of[index]
                remaining = bucket_left[bucket] - 1
                bucket_left[bucket] = remaining
                if remaining:
                    return
                on_full = full()
                if on_full is not None:
                    on_full()
                return
            on_uncounted = uncounted()
            if on_uncounted is not None:
                on_uncounted(index)

        hook.counts_for_reducer = True  # type: ignore[attr-defined]
        return hook
