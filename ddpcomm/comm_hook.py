"""Runs a communication hook by torch's contract, so that torch's own hooks work unchanged.

`hook(state, bucket) -> torch.futures.Future`, whose value is the new content of the bucket: one tensor, or a list of one. See
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddpcomm.buckets import Bucket
from ddpcomm.errors import CommHookError, DDPCommError

Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class GradBucket:
    """What a hook is given: torch's `torch.distributed.GradBucket`, which can't be made outside torch's own reducer."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.buffer.narrow(0, 0, bucket.layout.data_numel)

    def index(self) -> int:
        """The bucket's place in the launch order, from 0."""
        return self._bucket.layout.index

    def buffer(self) -> Tensor:
        """The flattened gradients, one-dimensional, not divided by the world size."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the shapes of the parameters."""
        return list(self._bucket.views)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another tensor in the buffer's place. The gradients that the hook's future brings count in the end."""
        self._buffer = buffer


class CommHook:
    """A registered hook with its state."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self.state = state
        self.hook = hook
        self.name = getattr(hook, "__qualname__", type(hook).__name__)

    def start(self, bucket: Bucket, is_last: bool) -> torch.futures.Future[Any]:
        """Calls the hook.

        Raises:
            CommHookError: it raised, or returned no future.
            DDPCommError: one of this package's own hooks failed.
        """
        try:
            future = self.hook(self.state, GradBucket(bucket, is_last))
        except DDPCommError:
            raise
        except Exception as error:
            raise CommHookError(
                f"the communication hook {self.name} raised {type(error).__name__} for bucket {bucket.layout.index}: {error}"
            ) from error
        if not isinstance(future, torch._C.Future):
            raise CommHookError(
                f"the communication hook {self.name} returned {type(future).__name__} for bucket {bucket.layout.index}; "
                "it must return a torch.futures.Future that holds the reduced bucket"
            )
        return future

    def finish(self, bucket: Bucket, future: torch.futures.Future[Any]) -> None:
        """Waits for the future and takes its value into the bucket. The wait's time limit is that of the hook's own collectives.

        Raises:
            CommHookError: the future failed, or its value isn't one tensor of the bucket's size.
        """
        try:
            value = future.wait()
        except Exception as error:
            raise CommHookError(f"the communication hook {self.name} failed for bucket {bucket.layout.index}: {error}") from error
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        numel = bucket.layout.data_numel
        if not isinstance(value, Tensor) or value.numel() != numel:
            found = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
            raise CommHookError(
                f"the future of the communication hook {self.name} holds {found} for bucket {bucket.layout.index}; "
                f"it must hold one tensor of the bucket's {numel} elements"
            )
        target = bucket.buffer.narrow(0, 0, numel)
        if value.data_ptr() != target.data_ptr() or value.dtype != target.dtype:
            target.copy_(value.detach().reshape(-1))
