"""Status words that are read later, so that the host doesn't wait for the device at the end of every backward."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, sleep

import torch
from torch import Tensor

from ddpcomm.errors import CollectiveTimeoutError
from ddpcomm.status import Status, decode

_POLL_SECONDS = 0.0005


class DeferredStatus:
    """The words of one backward, on their way to the host.

    Args:
        words: where the last bucket holds them; the current stream has been made to wait for its all-reduce.
        divisor: what their sum was divided by.
    """

    def __init__(self, words: Tensor, divisor: float) -> None:
        self._divisor = divisor
        self._words = torch.empty(words.shape, dtype=words.dtype, pin_memory=words.is_cuda)
        self._words.copy_(words, non_blocking=True)
        self._arrived = torch.cuda.Event() if words.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(words.device))

    def read(self, limit: timedelta) -> Status:
        """Waits for the words, which by the next backward have mostly arrived.

        Raises:
            CollectiveTimeoutError: they did not arrive in time.
        """
        deadline = monotonic() + limit.total_seconds()
        while self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            if monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"the last backward's averages did not arrive within {limit}: some rank never sent its buckets, or the device hangs. "
                    "End the job on all ranks and start again from a checkpoint."
                )
            sleep(_POLL_SECONDS)
        return decode(self._words.tolist(), self._divisor)
