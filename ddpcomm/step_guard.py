"""Makes an optimizer's step on gradients that are not averaged an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddpcomm.errors import UnsynchronizedGradientError
from ddpcomm.untraced import untraced


class StepGuard:
    """Looks at every optimizer's step in this process, until it is closed.

    Args:
        unsynchronized: a method that returns the names and reasons of parameters whose gradients are this rank's own, by id. Its object
            isn't kept alive.
    """

    def __init__(self, unsynchronized: Callable[[], Mapping[int, tuple[str, str]]]) -> None:
        self._unsynchronized = weakref.WeakMethod(unsynchronized)  # torch keeps the hook for ever
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    @untraced
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        ask = self._unsynchronized()
        found = ask() if ask is not None else None
        if not found:
            return
        parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        hit = [found[id(p)] for p in parameters if id(p) in found]
        if hit:
            raise UnsynchronizedGradientError(
                f"{type(optimizer).__name__}.step() would train on gradients that are not averaged over the ranks: "
                + "; ".join(f"{name} ({reason})" for name, reason in hit[:10])
                + ". Run a synchronising backward before the step, or clear the gradients"
            )

    def close(self) -> None:
        """Stops looking. Idempotent."""
        self._handle.remove()
