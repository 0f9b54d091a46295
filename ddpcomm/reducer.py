"""The state of one backward pass: counts gradients, sends full buckets, ends with every average in place.

Buckets go out strictly by index, each as soon as it and all before it are full. The last one always waits for the end of the backward: by
then every rank knows what it has to tell the others, and the last bucket's status words carry it. Per parameter nothing runs in Python but
the hook that counts down; everything else runs once a bucket.
"""

from __future__ import annotations

import enum
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpcomm.agreement import Agreement, Report, agree, signatures
from ddpcomm.arrangement import Arrangement
from ddpcomm.backward import BackwardWatch
from ddpcomm.comm.base import Communicator
from ddpcomm.comm_hook import CommHook
from ddpcomm.config import ReducerOptions
from ddpcomm.errors import (
    BackwardInterruptedError,
    CollectiveMismatchError,
    CommunicationError,
    DDPCommError,
    LateGradientError,
    RankMismatchError,
)
from ddpcomm.foreign_hooks import ForeignHooks
from ddpcomm.parameters import ParameterSet
from ddpcomm.reduction import Reduction
from ddpcomm.statistics import Statistics
from ddpcomm.status import Notice, Status

logger = logging.getLogger(__name__)


class Mode(enum.Enum):
    """What the backward under way does with gradients."""

    IDLE = enum.auto()
    """There is none."""
    LOCAL = enum.auto()
    """They stay on this rank, as under no_sync."""
    DELAYED = enum.auto()
    """They are averaged at its end: how often each parameter fires, and when, is not known yet."""
    OVERLAPPED = enum.auto()
    """Buckets go out while it runs."""


class Reducer:
    """Averages the gradients of a module's parameters over the ranks of a communicator, during backward.

    Making one is local, apart from the communicator's own set-up. Every backward that synchronises is collective.

    Args:
        module: whose parameters.
        communicator: over which ranks. The reducer doesn't own it.
        options: the same on all ranks.
        ignored: names of parameters to leave alone.
        delayed: names of parameters to send last.
        tag: tells models apart that share a communicator; the same on all ranks.
        wants_synchronization: whether a backward that no forward announced is to synchronise.
        statistics: where to record times.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        options: ReducerOptions,
        *,
        ignored: Collection[str] = (),
        delayed: Collection[str] = (),
        tag: int = 0,
        wants_synchronization: Callable[[], bool] = lambda: True,
        statistics: Statistics | None = None,
    ) -> None:
        self.communicator = communicator
        self.options = options
        self.divisor = float(communicator.world_size)
        self.broken: DDPCommError | None = None
        self.hook: CommHook | None = None
        self.wire_dtype: torch.dtype | None = None
        self.rebuilt = False
        self.backwards = 0
        self.statistics = statistics or Statistics()
        self.after_average: list[Callable[[], None]] = []
        self.wait_for: list[Any] = []
        self.graph_is_static = True
        self.finalized = True
        self.last_unused: dict[str, str] = {}
        self._module = module
        self._ignored = frozenset(ignored)
        self._delayed = frozenset(delayed)
        self._tag = tag
        self._wants_synchronization = wants_synchronization
        self._mode = Mode.IDLE
        self._interrupted = False
        self._learned = False
        self._changed = False
        self._requested = False
        self._warned_unused = False
        self._failure: DDPCommError | None = None
        self._late: set[int] = set()
        self._ready_order: list[int] = []
        self._reduction: Reduction | None = None
        self._fires_left: list[int] = []
        self._bucket_left: list[int] = []
        self._bucket_of: list[int] = []
        self._handles: list[Any] = []
        self.watch = BackwardWatch(self._begin, self._end, self._on_interrupt, self._likely_first)
        self._foreign = ForeignHooks(self._holds_back)
        self.parameters = ParameterSet(module, self._ignored)
        self._expected: list[int] = []
        self._dirty: list[str] = []
        self._used_before: list[bool] | None = None
        self._flags: list[tuple[Sequence[int], Tensor]] = []
        self._adopt(self.parameters, (), {})

    # ---- which parameters, in which buckets -------------------------------------------------------------------------

    def _adopt(self, parameters: ParameterSet, ready_order: Sequence[str], fires: Mapping[str, int]) -> None:
        """Lays out `parameters` anew and hooks them. Local."""
        was_dirty = {m.identity: why for m, why in zip(self.parameters.managed, self._dirty, strict=False) if why}
        self.parameters = parameters
        self._expected = [fires.get(name, 1) for name in parameters.names]
        self._dirty = [was_dirty.get(m.identity, "") for m in parameters.managed]
        self._order = self._launch_order(ready_order)
        self.unhook()
        self._fires_left[:] = [0] * len(parameters.managed)
        self._handles = [m.parameter.register_post_accumulate_grad_hook(self._make_hook(i)) for i, m in enumerate(parameters.managed)]
        self._foreign.watch(parameters.parameters)
        self.arrange()

    def _launch_order(self, ready_order: Sequence[str]) -> list[int]:
        """As they became ready; those that never did in reverse order of registration; delayed ones last of all."""
        index_of = {name: index for index, name in enumerate(self.parameters.names)}
        known = [index_of[name] for name in ready_order if name in index_of]
        rest = [index for index in reversed(range(len(index_of))) if index not in set(known)]
        return sorted(known + rest, key=lambda index: self.parameters.managed[index].name in self._delayed)

    def arrange(self) -> None:
        """Makes the buckets for the present parameters, order, hook and wire format. Local; gradients that are views move along."""
        former = self.arrangement if hasattr(self, "arrangement") else None
        self.arrangement = Arrangement(
            self.parameters.managed,
            self._order,
            self.options.caps,
            self.communicator,
            wire_dtype=self.wire_dtype,
            apart=self.hook is not None,
        )
        self._bucket_of[:] = self.arrangement.bucket_of
        self._bucket_left[:] = self.arrangement.counts
        if former is not None and self.options.gradient_as_bucket_view:
            self.arrangement.take_over(former)

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        """The countdown: the one thing that runs for each parameter. 0.25 us, of the 0.9 us that any Python hook here costs torch."""
        fires_left, bucket_left, bucket_of = self._fires_left, self._bucket_left, self._bucket_of
        me = weakref.ref(self)

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
                reducer = me()
                if reducer is not None:
                    reducer._launch_full()
                return
            reducer = me()
            if reducer is not None:
                reducer._on_uncounted(index)

        hook.counts_for_reducer = True  # type: ignore[attr-defined]
        return hook

    def unhook(self) -> None:
        """Takes the hooks off the parameters: gradients stay this rank's own from then on. Idempotent."""
        self._foreign.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def use(self, communicator: Communicator) -> None:
        """Goes on over other ranks. Local; no backward may be under way."""
        self.communicator = communicator
        self.divisor = float(communicator.world_size)
        self.broken = None
        self._learned = False
        self.arrange()

    def close(self) -> None:
        """Takes the hooks off the parameters and forgets a backward under way. Idempotent."""
        self.unhook()
        self.watch.forget()
        self._mode = Mode.IDLE

    # ---- a backward begins ------------------------------------------------------------------------------------------

    def prepare_forward(self) -> None:
        """Ends what an interrupted backward left open. Collective only then."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._mode is not Mode.IDLE:
            self._on_interrupt()
        if self._interrupted:
            self._recover()

    def _likely_first(self) -> Sequence[Tensor]:
        """The parameters, the one first that is likely to receive the first gradient."""
        parameters = self.parameters.parameters
        return [parameters[index] for index in self._order]

    def _begin(self, synchronize: bool) -> None:
        synchronize = synchronize or self._requested
        if self._mode is Mode.IDLE:
            self._open(synchronize)
        elif synchronize and self._mode is Mode.LOCAL:
            self._mode = Mode.DELAYED  # one of several outputs asks for it, and speaks for all
            self._reduction = self._new_reduction(self.arrangement)

    def _open(self, synchronize: bool) -> None:
        if self._interrupted:
            self._recover()
        if synchronize and self.broken is not None:
            raise type(self.broken)(f"an earlier failure left this model without synchronisation: {self.broken}")
        self._foreign.look()
        self._ready_order = []
        if not synchronize:
            self._mode = Mode.LOCAL
            return
        self.backwards += 1
        self.finalized = False
        self.statistics.backward_starts()
        self._reduction = self._new_reduction(self.arrangement)
        self._changed = self.parameters.replaced_or_unfrozen()
        if self._learned and not self._changed:
            self._mode = Mode.OVERLAPPED
            self._fires_left[:] = self._expected
            self._bucket_left[:] = self.arrangement.counts
        else:
            self._mode = Mode.DELAYED

    def _new_reduction(self, arrangement: Arrangement) -> Reduction:
        return Reduction(
            arrangement,
            self.communicator,
            divisor=self.divisor,
            hook=self.hook,
            as_view=self.options.gradient_as_bucket_view,
            tag=self._tag,
        )

    # ---- gradients arrive -------------------------------------------------------------------------------------------

    def _launch_full(self) -> None:
        reduction, left = self._reduction, self._bucket_left
        if reduction is None or self._mode is not Mode.OVERLAPPED:
            return
        while reduction.next < self.arrangement.last and left[reduction.next] == 0:
            self.statistics.bucket_launched()
            reduction.launch()

    def _on_uncounted(self, index: int) -> None:
        """A gradient that the countdown doesn't expect: the first of a backward that nobody announced, any but the fast mode's, one more
        than was learned."""
        if self._mode is Mode.IDLE:
            self._fires_left[index] += 1
            self._start_unannounced()
            if self._mode is Mode.OVERLAPPED:
                self._recount(index)
                return
            self._fires_left[index] -= 1
        if self._mode is Mode.OVERLAPPED:
            reduction = self._reduction
            if reduction is not None and self._bucket_of[index] < reduction.next:
                self._late.add(index)
        else:
            self._ready_order.append(index)

    def _recount(self, index: int) -> None:
        left = self._fires_left[index] - 1
        self._fires_left[index] = left
        if left == 0:
            self._bucket_left[self._bucket_of[index]] -= 1
            self._launch_full()

    def _start_unannounced(self) -> None:
        self.watch.started_by_parameter()
        self._begin(self._wants_synchronization())

    def _holds_back(self) -> bool:
        """Whether a hook of the user's has to wait for the average."""
        if self._mode is Mode.IDLE:
            self._start_unannounced()
        return self._mode is not Mode.LOCAL

    def _fires(self) -> list[int]:
        """How often each parameter received a gradient in this backward."""
        if self._mode is Mode.OVERLAPPED:
            return [expected - left for expected, left in zip(self._expected, self._fires_left, strict=True)]
        return [-left for left in self._fires_left]

    # ---- a backward ends --------------------------------------------------------------------------------------------

    def _end(self) -> None:
        mode, fires = self._mode, self._fires()
        if mode is Mode.IDLE:
            return
        if mode is Mode.LOCAL:
            self._mark_dirty(fires, "accumulated without synchronisation, as under no_sync")
            self._rest()
            return
        try:
            self._synchronize(fires)
        except CommunicationError as error:
            self.broken = error
            self._fail(fires, error)
            raise
        except DDPCommError as error:
            self._fail(fires, error)
            raise
        except BaseException:
            self._on_interrupt()
            raise
        self._rest()
        self.finalized = True
        self._foreign.run_waiting()
        for run in self.after_average:
            run()

    def _fail(self, fires: Sequence[int], error: DDPCommError) -> None:
        self.statistics.error = f"{type(error).__name__}: {error}"
        self._foreign.drop_waiting()
        self._mark_dirty(fires, f"not averaged: {error}")
        self._rest()

    def _rest(self) -> None:
        self._mode = Mode.IDLE
        self._reduction = None
        self._failure = None
        self._late.clear()
        self._fires_left[:] = [0] * len(self._expected)
        self._requested = False

    def _mark_dirty(self, fires: Sequence[int], why: str) -> None:
        self._dirty = [why if count > 0 else before for before, count in zip(self._dirty, fires, strict=True)]

    def _synchronize(self, fires: Sequence[int]) -> None:
        reduction = self._reduction
        if reduction is None:
            return
        self.statistics.gradients_complete()
        used = [
            count > 0 or (why != "" and m.parameter.grad is not None)
            for count, why, m in zip(fires, self._dirty, self.parameters.managed, strict=True)
        ]
        self._launch_rest(reduction, used, lambda: self._notices(reduction, fires))
        self._settle(reduction, used, fires, void=False)
        for future in self.wait_for:
            future.wait()
        self.wait_for.clear()
        self.statistics.buckets_reduced = reduction.launched
        self.statistics.communication_ends()

    def shadow(self) -> None:
        """Takes part, with zeros, in a backward of the other ranks: this one has run out of input. Collective."""
        self.prepare_forward()
        nothing = [False] * len(self._expected)
        reduction = self._new_reduction(self.arrangement)
        self._launch_rest(reduction, nothing, set, void=True)
        self._settle(reduction, nothing, [0] * len(nothing), void=True)

    def _launch_rest(self, reduction: Reduction, used: Sequence[bool], notices: Callable[[], set[Notice]], *, void: bool = False) -> None:
        while reduction.next < reduction.arrangement.last:
            members = reduction.arrangement.buckets[reduction.next].slots
            if self.options.skip_unused_buckets and not any(used[slot.parameter] for slot in members):
                reduction.skip()
            else:
                reduction.launch(None if all(used) else used, void=void)
        reduction.finish_hooks()
        reduction.launch(None if all(used) else used, notices, void=void)
        reduction.average_sparse(self.parameters.parameters, used)

    def _notices(self, reduction: Reduction, fires: Sequence[int]) -> set[Notice]:
        found = set()
        if self._failure is not None or reduction.failure is not None:
            found.add(Notice.FAILED)
        if self._late:
            found.add(Notice.LATE)
        frozen = any(not m.parameter.requires_grad for m, count in zip(self.parameters.managed, fires, strict=True) if not count)
        if self._changed or reduction.misfits or frozen:
            found.add(Notice.CHANGED)
        if not self._learned and self.communicator.rank == 0 and any(fires):
            found.add(Notice.LEARNED)
        return found

    def _settle(self, reduction: Reduction, used: Sequence[bool], fires: Sequence[int], *, void: bool) -> None:
        """Waits, hears what the ranks have to say, and puts the averages in place."""
        status = reduction.wait()
        self._raise_for(status)
        if not status.notices:
            self._put_in_place(reduction, used, frozenset(), void=void)
            return
        present = ParameterSet(self._module, self._ignored, self._sparse_names(reduction))
        agreement = agree(self.communicator, self._report(reduction, present, fires))
        if agreement.late:
            self._refuse_late(agreement)
            reduction = self._new_reduction(self.arrangement)
            self._launch_rest(reduction, used, set, void=void)
            self._raise_for(reduction.wait())
        if agreement.newcomers and not agreement.unanimous and self.options.gradient_as_bucket_view:
            raise RankMismatchError(
                f"{', '.join(sorted(agreement.newcomers))} was replaced, cast or unfrozen on some ranks only, and its gradient lies in a "
                "bucket that has been reduced already; change the parameters on every rank, between two steps"
            )
        self._put_in_place(reduction, used, agreement.newcomers, void=void)
        if Notice.CHANGED in status:
            present = ParameterSet(self._module, self._ignored, agreement.sparse)
            self._average_newcomers(present, agreement.newcomers, void=void)
        else:
            present = self.parameters
        self._learned = self._learned or Notice.LEARNED in status
        self.rebuilt = self.rebuilt or Notice.LEARNED in status
        self._adopt(present, agreement.ready_order, agreement.fires)

    def _raise_for(self, status: Status) -> None:
        if status.mixed:
            raise CollectiveMismatchError(
                f"rank {self.communicator.rank} reduced buckets of one model with another model's on other ranks: "
                "run the backwards of all models in the same order on every rank"
            )
        if Notice.INTERRUPTED in status:
            who = "several ranks" if status.interrupted_rank is None else f"rank {status.interrupted_rank}"
            raise BackwardInterruptedError(
                f"backward ended with an exception on {who}: this step has no averaged gradients on any rank. "
                "Clear the gradients (zero_grad) and skip the step, or end the job"
            )

    def _sparse_names(self, reduction: Reduction) -> set[str]:
        managed = self.parameters.managed
        return {m.name for m in managed if m.sparse} | {managed[misfit.parameter].name for misfit in reduction.misfits if misfit.sparse}

    def _report(self, reduction: Reduction, present: ParameterSet, fires: Sequence[int]) -> Report:
        names = self.parameters.names
        failure = self._failure or reduction.failure
        order = list(dict.fromkeys(reversed(self._ready_order)))[::-1] or self._order
        return Report(
            signatures=signatures(present),
            failure=None if failure is None else (type(failure), str(failure)),
            late=tuple(names[index] for index in sorted(self._late)),
            ready_order=tuple(names[index] for index in order),
            fires={name: max(count, expected) for name, count, expected in zip(names, fires, self._expected, strict=True)},
            sparse=tuple(sorted(m.name for m in present.managed if m.sparse)),
            newcomers=tuple(present.managed[index].name for index in present.newcomers(self.parameters.managed)),
        )

    def _refuse_late(self, agreement: Agreement) -> None:
        """Gradients that were not written over yet can simply be reduced once more; views of a bucket were.

        Raises:
            LateGradientError: they are views, or a hook with a memory of its own has seen them.
        """
        if not self.options.gradient_as_bucket_view and self.hook is None:
            return
        late = "; ".join(f"{name} (on rank {', '.join(map(str, ranks))})" for name, ranks in agreement.late.items())
        raise LateGradientError(
            f"these parameters received a gradient more often than in earlier backwards, after their bucket had gone out: {late}. "
            "The gradients of this step are void. Use gradient_as_bucket_view=False and no communication hook where the number of "
            "re-entrant checkpoints of a layer varies"
        )

    def _put_in_place(self, reduction: Reduction, used: Sequence[bool], newcomers: Collection[str], *, void: bool) -> None:
        if void:
            return
        somewhere = reduction.used_somewhere(used)
        names = self.parameters.names
        reduction.write_back([flag and name not in newcomers for flag, name in zip(somewhere, names, strict=True)])
        self._dirty = [""] * len(names)
        self._remember(reduction, used, somewhere)
        self.last_unused = {
            name: "used on other ranks only" if anywhere else "used on no rank"
            for name, here, anywhere in zip(names, used, somewhere, strict=True)
            if not here
        }
        nowhere = [name for name, anywhere in zip(names, somewhere, strict=True) if not anywhere]
        if nowhere and not (self.options.find_unused_parameters or self.options.static_graph or self._warned_unused):
            self._warned_unused = True
            warnings.warn(
                f"no rank used these parameters in this backward, so their gradients stay as they were: {', '.join(nowhere)}. "
                "This is told once; find_unused_parameters=True says that it is meant",
                stacklevel=2,
            )

    def _remember(self, reduction: Reduction, used: Sequence[bool], somewhere: Sequence[bool]) -> None:
        self.graph_is_static = self.graph_is_static and self._used_before in (None, list(used))
        self._used_before = list(used)
        idle = [m.parameter for m, anywhere in zip(self.parameters.managed, somewhere, strict=True) if not anywhere]
        self.statistics.unused_parameter_bytes = sum(p.numel() * p.element_size() for p in idle)
        self.statistics.ready_order = list(dict.fromkeys(reversed(self._ready_order)))[::-1] or self._order
        if self.options.find_unused_parameters:
            self._flags = [(bucket.layout.flagged, bucket.flags.clone()) for bucket in reduction.arrangement.buckets]

    def used_counts(self) -> Tensor:
        """On how many ranks each parameter was used in the last backward; int32. Kept with `find_unused_parameters` alone."""
        counts = torch.zeros(len(self._expected), dtype=torch.int32, device=self.communicator.device)
        for flagged, flags in self._flags:
            shares = flags.double() * (1.0 if self.options.gradient_as_bucket_view else self.divisor)
            counts[list(flagged)] = shares.round().to(torch.int32)
        return counts

    def unsynchronized(self) -> dict[str, str]:
        """Parameters whose gradient is this rank's own, and why."""
        return {m.name: why for m, why in zip(self.parameters.managed, self._dirty, strict=True) if why and m.parameter.grad is not None}

    def fail_at_end(self, error: DDPCommError) -> None:
        """Keeps an error of this rank's until the end of the next backward that synchronises, where all ranks raise it."""
        self._failure = self._failure or error

    def request_synchronization(self, outputs: Sequence[Tensor]) -> None:
        """The next backward synchronises, though the forward before it was run under no_sync."""
        self._requested = True
        self.watch.watch(outputs, True)

    def _average_newcomers(self, present: ParameterSet, names: Collection[str], *, void: bool) -> None:
        """Averages gradients that had no place in any bucket, in buckets of their own. Collective."""
        order = [index for index, name in enumerate(present.names) if name in names]
        if not order:
            return
        arrangement = Arrangement(present.managed, order, self.options.caps, self.communicator)
        reduction = Reduction(arrangement, self.communicator, divisor=self.divisor, hook=None, as_view=False, tag=self._tag)
        used = [m.parameter.grad is not None and not void for m in present.managed]
        while reduction.next < len(arrangement.buckets):
            reduction.launch(used, void=void)
        reduction.average_sparse(present.parameters, used)
        self._raise_for(reduction.wait())
        if not void:
            reduction.write_back(reduction.used_somewhere(used))

    # ---- a backward is interrupted ----------------------------------------------------------------------------------

    def _on_interrupt(self) -> None:
        """Backward raised on this rank. The others wait for its buckets: they go out void, and the last one says so. Never blocks."""
        mode, reduction = self._mode, self._reduction
        self._foreign.drop_waiting()
        self._mark_dirty(self._fires(), "backward raised an exception")
        self._rest()
        if mode is Mode.LOCAL or reduction is None or self.broken is not None:
            return
        self._reduction = reduction
        self._interrupted = True
        try:
            while reduction.next < len(reduction.arrangement.buckets):
                reduction.launch([False] * len(self._expected), lambda: {Notice.INTERRUPTED}, void=True)
        except CommunicationError as error:
            self.broken = error

    def _recover(self) -> None:
        """Takes an interrupted backward's buckets back in, so that the next backward's meet their own kind. Collective."""
        reduction, self._reduction = self._reduction, None
        self._interrupted = False
        if reduction is None or self.broken is not None:
            return
        try:
            reduction.finish_hooks()
            reduction.average_sparse(self.parameters.parameters, [False] * len(self._expected))
            reduction.wait()
        except CommunicationError as error:
            self.broken = error
            raise
