"""Counts the gradients of a backward down, parameter by parameter: the one thing here that runs once for each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ddpcomm import _native
from ddpcomm.arrangement import Arrangement
from ddpcomm.untraced import untraced


class Countdown:
    """The hooks of a reducer's parameters.

    While nothing is armed, every gradient is reported as uncounted. The hooks are native: a post-accumulate hook that is a closure in
    Python, doing the same, costs torch a third more (2.4 us beside 1.8 us, on a busy machine where a parameter's whole share of this
    backward took 15 us).

    Args:
        full: called when a bucket has all its gradients.
        uncounted: called with the parameter's index at each gradient beyond those that were expected.
        current_stream: tells the stream that a gradient is produced on, by its number; None where there are none.
    """

    def __init__(self, full: Callable[[], None], uncounted: Callable[[int], None], current_stream: Callable[[], int] | None = None) -> None:
        # torch keeps the hooks where Python's garbage collector can't see them: they must not keep their owner alive.
        call_full, call_uncounted = (partial(_call, weakref.WeakMethod(method)) for method in (full, uncounted))
        self._counts = _native.Countdown(call_full, call_uncounted, current_stream)
        self._handles: list[Any] = []
        self._parameters: list[Tensor] = []
        self._tensors: list[int] = []
        self.expected: list[int] = []
        """How often each parameter receives a gradient in a backward, as far as is known."""

    def attach(self, parameters: Sequence[Tensor], expected: Sequence[int]) -> None:
        """Hooks these parameters, in place of those before."""
        self.detach()
        self._parameters = list(parameters)
        self._tensors = [parameter._cdata for parameter in parameters]  # torch's own objects, which hold the hooks
        self.expected = list(expected)
        self._counts.resize(len(parameters))
        for index, parameter in enumerate(parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._counts.hook(index)))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Takes the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unhooked(self, indices: Iterable[int]) -> list[int]:
        """Those of these parameters that have lost their hook: to `torch.utils.swap_tensors`, say, which leaves the object the same."""
        return [i for i in indices if self._parameters[i]._cdata != self._tensors[i]]

    def give_hooks_back(self) -> None:
        """Tells torch of the hooks, the user's among them, of those that have lost theirs: the object has kept them."""
        for i in self.unhooked(range(len(self._parameters))):
            parameter = self._parameters[i]
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks

    def arm(self, arrangement: Arrangement) -> None:
        """From now on the expected gradients count their buckets down."""
        self._counts.arm(self.expected, arrangement.counts, arrangement.bucket_of)

    def rest(self) -> None:
        """Nothing is expected any more."""
        self._counts.rest()

    def is_full(self, bucket: int) -> bool:
        """Whether a bucket has all its gradients."""
        return self._counts.is_full(bucket)

    def streams(self, bucket: int) -> list[int]:
        """The streams that an armed bucket's gradients were produced on, by their numbers."""
        return self._counts.streams(bucket)

    def fires(self) -> list[int]:
        """How often each parameter received a gradient since `arm` or `rest`."""
        return self._counts.fires()

    def recount(self, index: int) -> None:
        """Counts a gradient that came before the countdown was armed, and that arming forgot."""
        self._counts.recount(index)

    def forget(self, index: int) -> None:
        """Takes a count back."""
        self._counts.forget(index)


@untraced
def _call(method: weakref.WeakMethod[Callable[..., None]], *arguments: int) -> None:
    call = method()
    if call is not None:
        call(*arguments)
