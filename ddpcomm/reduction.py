"""One reduction of all buckets: out in order, back in order, and into `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ddpcomm.arrangement import Arrangement
from ddpcomm.buckets import Bucket, Misfit
from ddpcomm.comm.base import Communicator, Elsewhere, ReduceOp, Work
from ddpcomm.comm_hook import CommHook
from ddpcomm.deferred import DeferredStatus
from ddpcomm.errors import CommHookError, CommunicationError
from ddpcomm.nonfinite import Screen
from ddpcomm.recording import StepRecording
from ddpcomm.sparse import average
from ddpcomm.status import Notice, Status, decode, encode
from ddpcomm.streams import wait_for_producers


class Reduction:
    """Takes an arrangement's buckets through one all-reduce each.

    Args:
        arrangement: the buckets.
        communicator: reduces them.
        divisor: what the sum over the ranks is divided by; the world size, unless some ranks have run out of input.
        hook: takes the all-reduce's place, if given; the arrangement must keep its flags apart.
        as_view: gradients become views of the buckets.
        tag: tells models apart; the same on all ranks.
        screen: looks for gradients that are not finite, if given.
        tell: called with the first failure of the hook, when it is met: the other ranks may wait in vain for what it did not send.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        communicator: Communicator,
        *,
        divisor: float,
        hook: CommHook | None,
        as_view: bool,
        tag: int,
        screen: Screen | None = None,
        tell: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.arrangement = arrangement
        self.next = 0
        self.misfits: list[Misfit] = []
        self.absent: set[int] = set()
        """Parameters without a gradient when their bucket went out."""
        self.failure: CommHookError | None = None
        self.launched = 0
        self.recording: StepRecording | None = None
        """Where to note times, while there is a timeline."""
        self.said_something = False
        """Whether this rank's last bucket carried a notice."""
        self.waits_for: int | None = None
        """The bucket that is being waited for."""
        self._communicator = communicator
        self._divisor = divisor
        self._hook = hook
        self._as_view = as_view
        self._tag = tag
        self._tell = tell
        self.screen = screen
        # Who divides? A transport that averages in passing, where gradients may lie in the bucket already and a pass of our own would read
        # and write them once more; else flatten, as the bytes go by. Every rank must decide alike, whatever its gradients are.
        # In another format on the wire, flatten does: what is cast unscaled may overflow. One that reads this rank's own share of a bucket
        # where the gradients are averages in passing, too.
        plain = hook is None and communicator.averages_in_passing and arrangement.native_format
        # Whoever looks for gradients that are not finite looks at whole buckets.
        self._leaves_share = plain and communicator.reads_elsewhere and divisor == communicator.world_size and screen is None
        self._averages = self._leaves_share or (plain and as_view)
        self._ending = False
        """Whether backward is over: from then on, no code but this package's runs until all buckets are back."""
        self._works: list[Work | None] = []
        self._futures: dict[int, Any] = {}
        self._kept: dict[int, list[tuple[int, Tensor]]] = {}
        self._used_sparse: dict[int, bool] = {}
        self._whole: list[Bucket] = []

    # ---- out --------------------------------------------------------------------------------------------------------

    def launch(
        self,
        used: Sequence[bool] | None = None,
        notices: Callable[[], set[Notice]] = set[Notice],
        *,
        void: bool = False,
        tail_only: bool = False,
        producers: Sequence[int] = (),
    ) -> None:
        """Sends the next bucket.

        Args:
            used: by parameter, whether this rank used it; None means that it used all of the bucket's.
            notices: called for what this rank has to say, by the last bucket, once its gradients have been looked at.
            void: send zeros, whatever the gradients are.
            tail_only: send flags and status alone. All ranks must do so.
            producers: the streams that the gradients were produced on, beside the current one.
        """
        index, bucket = self.next, self.arrangement.buckets[self.next]
        self.next += 1
        if producers:  # before gradients are copied into memory order, too
            wait_for_producers(producers, [p.grad for p in bucket.parameters], bucket.device)
        sources, misfits, absent = ([None] * len(bucket.slots), [], []) if void else bucket.gather()
        if used is not None and self._as_view and not void:
            self._kept[index] = bucket.keep_unused([used[slot.parameter] for slot in bucket.slots])
        self.misfits += misfits
        self.absent.update(absent)
        flags = None if used is None and not self.misfits and not self.absent else self._flags(bucket, used)
        if self._hook is not None and bucket.slots:
            self._launch_hook(index, bucket, sources, flags)
            return
        words: tuple[float, ...] = ()
        if bucket.layout.has_status:
            said = notices()
            self.said_something = bool(said)
            words = encode(said, self._communicator.rank, self._tag)
        recording = self.recording
        if recording is not None:
            recording.mark("flatten", index)
        start = bucket.layout.flags_offset if tail_only else 0
        skipped = []
        if self._leaves_share and not start and (self._ending or self._communicator.others_have_called()):
            # Read before any code of the user's runs again, which might change a gradient: in the call itself, or in the wait at the end.
            share = self._communicator.own_share(bucket.layout.total_numel, bucket.dtype)
            skipped = bucket.pack_around(sources, flags, words, share)
        else:
            bucket.pack(sources, flags, words, 1.0 if self._averages else 1.0 / self._divisor)
        if self.screen is not None:
            self._look(bucket, void=void or tail_only)
        sent = bucket.buffer.narrow(0, start, bucket.layout.total_numel - start) if start else bucket.buffer
        if recording is not None:
            recording.launches(index)
        self._communicator.announce(self.arrangement.headers[index])
        try:
            self._works.append(self._send(bucket, sent, sources, skipped))
        except CommunicationError as error:
            self._explain(error, index)
            raise
        if recording is not None:
            recording.sent(index, self._works[-1])
        self.launched += not tail_only
        if self.screen is not None and not tail_only:
            self._whole.append(bucket)

    def _look(self, bucket: Bucket, *, void: bool) -> None:
        if self.screen is None:
            return
        if not void:
            self.screen.look(bucket)
        if bucket.layout.has_status:
            self.screen.tell(bucket)

    def _send(self, bucket: Bucket, sent: Tensor, sources: Sequence[Tensor | None], skipped: Sequence[tuple[int, int, int, int]]) -> Work:
        """Sends a bucket, of which some parts are still in the gradients."""
        op: ReduceOp = "avg" if self._averages else "sum"
        if not skipped:
            return self._communicator.all_reduce(sent, op)
        keep = [gradient for position, *_ in skipped if (gradient := sources[position]) is not None]
        return self._communicator.all_reduce_from(sent, op, [Elsewhere(*part) for _, *part in skipped], keep)

    def _flags(self, bucket: Bucket, used: Sequence[bool] | None) -> list[bool]:
        left_out = self.absent.union(misfit.parameter for misfit in self.misfits)
        return [(used is None or used[parameter]) and parameter not in left_out for parameter in bucket.layout.flagged]

    def _launch_hook(self, index: int, bucket: Bucket, sources: Sequence[Tensor | None], flags: Sequence[bool] | None) -> None:
        hook = self._hook
        recording = self.recording
        if recording is not None:
            recording.mark("flatten", index)
        bucket.pack(sources, flags, (), 1.0)
        if self.screen is not None:
            self.screen.look(bucket)
        if recording is not None:
            recording.mark("all_reduce", index)
        self._works.append(None)
        self.launched += 1
        if hook is None:
            return
        try:  # after a failure too: the other ranks' hooks wait for this rank's collectives
            self._futures[index] = hook.start(bucket, is_last=index == self.arrangement.last - 1)
        except CommHookError as error:
            self._hook_failed(error)
        if recording is not None:
            recording.sent(index, None)

    def _hook_failed(self, error: CommHookError) -> None:
        if self.failure is None:
            self.failure = error
            self._tell(error)

    def launch_rest(self, used: Sequence[bool], notices: Callable[[], set[Notice]], *, void: bool, skip_unused: bool) -> None:
        """Sends every bucket that hasn't gone out yet.

        Args:
            used, notices, void: as for `launch`.
            skip_unused: buckets in which this rank used nothing stay at home. All ranks must agree on what is used.
        """

        def stays_home() -> bool:
            slots = self.arrangement.buckets[self.next].slots
            return skip_unused and not void and not any(used[slot.parameter] for slot in slots)

        flags = None if all(used) else used
        self._ending = True
        while self.next < self.arrangement.last:
            if stays_home():
                self.skip()
            else:
                self.launch(flags, void=void)
        self.finish_hooks()
        self.launch(flags, notices, void=void, tail_only=stays_home())

    @property
    def all_sent(self) -> bool:
        """Whether every bucket has gone out."""
        return self.next == len(self.arrangement.buckets)

    def has_launched(self, parameter: int) -> bool:
        """Whether the bucket of a parameter has gone out."""
        return self.arrangement.bucket_of[parameter] < self.next

    def lost(self) -> list[int]:
        """Parameters whose gradient is no longer the one that went out. The bucket in hand has only just been looked at."""
        return [index for bucket in self.arrangement.buckets[: self.next - 1] for index in bucket.lost()]

    def skip(self) -> None:
        """Leaves out the next bucket, which must not be the last. All ranks must do so."""
        self.arrangement.buckets[self.next].forget()
        self.next += 1
        self._works.append(None)

    def finish_hooks(self) -> None:
        """Waits for the hooks' futures, so that the last bucket can say how they went."""
        recording = self.recording
        for index, future in self._futures.items():
            if recording is not None:
                recording.mark("wait", index)
            try:
                if self._hook is not None:
                    self._hook.finish(self.arrangement.buckets[index], future)
                    if self.screen is not None:
                        self.screen.look(self.arrangement.buckets[index], after_hook=True)
            except CommHookError as error:
                self._hook_failed(error)
            if recording is not None:
                recording.waited(index)
        self._futures.clear()

    def average_sparse(self, parameters: Sequence[Tensor], used: Sequence[bool], *, void: bool = False) -> None:
        """Averages the sparse gradients. Collective, blocking."""
        for index in self.arrangement.sparse:
            self._used_sparse[index] = average(self._communicator, parameters[index], used[index], self._divisor, void=void)

    # ---- back -------------------------------------------------------------------------------------------------------

    def wait(self) -> Status:
        """Waits for every bucket, and reads what the ranks had to say. On CUDA the host waits for the last bucket.

        Raises:
            CommunicationError: a bucket's all-reduce failed; the message names it and its parameters.
        """
        words, divisor = self._wait_for_words()
        return decode(words.tolist(), divisor)

    def wait_and_defer(self) -> DeferredStatus:
        """The same, but on CUDA the host waits for nothing: what the ranks had to say can be read later."""
        return DeferredStatus(*self._wait_for_words())

    def _wait_for_words(self) -> tuple[Tensor, float]:
        recording = self.recording
        for index, work in enumerate(self._works):
            if work is None:
                continue
            self.waits_for = index
            if recording is not None:
                recording.mark("wait", index)
            try:
                work.wait()
            except CommunicationError as error:
                self._explain(error, index)
                raise
            if recording is not None:
                recording.waited(index)
            if self._averages and self._divisor != self._communicator.world_size:
                bucket = self.arrangement.buckets[index]
                bucket.buffer.narrow(0, 0, bucket.layout.data_numel).mul_(self._communicator.world_size / self._divisor)
        return self.arrangement.buckets[-1].status, self._communicator.world_size if self._averages else self._divisor

    def averaged_buckets(self) -> list[Bucket]:
        """Those with gradients that all ranks hold the same averages of."""
        return [bucket for bucket in self._whole if bucket.slots]

    def averaged_sparse(self) -> list[int]:
        """The sparse parameters that some rank used."""
        return [index for index, used in self._used_sparse.items() if used]

    def drop(self) -> None:
        """Makes nothing of the averages."""
        for bucket in self.arrangement.buckets:
            bucket.forget()

    def used_somewhere(self, used: Sequence[bool]) -> list[bool]:
        """By parameter, whether some rank used it, given whether this one did."""
        result = list(used)
        if all(used):
            return result
        for bucket, work in zip(self.arrangement.buckets, self._works, strict=True):
            flagged = bucket.layout.flagged
            if work is not None and not all(used[parameter] for parameter in flagged):
                for parameter, flag in zip(flagged, bucket.used_by_some_rank(), strict=True):
                    result[parameter] = flag
        for parameter, flag in self._used_sparse.items():
            result[parameter] = flag
        return result

    def write_back(self, used_somewhere: Sequence[bool]) -> None:
        """Gives every parameter that some rank used its average, and leaves the others as they were.

        Args:
            used_somewhere: by parameter.

        Raises:
            LostGradientError: a gradient was taken away or exchanged while its bucket was under way.
        """
        everything = all(used_somewhere)
        into_tensors = [bucket for bucket in self.arrangement.buckets if not (self._as_view and bucket.native_format)]
        apart = dict(zip(map(id, into_tensors), map(frozenset, Bucket.overlapping(into_tensors)), strict=True))
        for index, bucket in enumerate(self.arrangement.buckets):
            if not bucket.slots:
                continue
            used = [True] * len(bucket.slots) if everything else [used_somewhere[slot.parameter] for slot in bucket.slots]
            for position, value in self._kept.get(index, ()):
                if not used[position]:
                    bucket.views[position].copy_(value)
            if any(used):
                if self.recording is not None:
                    self.recording.mark("unflatten", index)
                bucket.unpack(used, self._as_view, apart.get(id(bucket), frozenset()))
                if self.recording is not None:
                    self.recording.mark("unflattened", index)
            bucket.forget()

    def _explain(self, error: CommunicationError, index: int) -> None:
        """Puts the bucket and its parameters in front of the error's message."""
        arrangement = self.arrangement
        place = f"bucket {index} of {len(arrangement.buckets)} ({arrangement.names(index) or 'status alone'})"
        error.args = (f"{place} could not be averaged on rank {self._communicator.rank}: {error}",)
