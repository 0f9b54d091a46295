"""The state of one backward pass: sends buckets as they fill, ends with every average in place.

Buckets go out strictly by index, each as soon as it and all before it are full. The last one always waits for the end of the backward: by
then every rank knows what it has to tell the others, and the last bucket's status words carry it. Per parameter nothing runs in Python but
the countdown; everything else runs once a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ddpcomm.arrangement import Arrangement
from ddpcomm.backward import BackwardWatch
from ddpcomm.comm.base import Communicator
from ddpcomm.comm_hook import CommHook
from ddpcomm.config import ReducerOptions
from ddpcomm.countdown import Countdown
from ddpcomm.deferred import DeferredStatus
from ddpcomm.errors import CommunicationError, DDPCommError
from ddpcomm.failure import Failure, name_cause
from ddpcomm.foreign_hooks import ForeignHooks
from ddpcomm.interruption import Interruption
from ddpcomm.mode import Mode
from ddpcomm.nonfinite import Screen
from ddpcomm.other_ranks import OtherRanks
from ddpcomm.parameters import ParameterSet
from ddpcomm.record import Record
from ddpcomm.reduction import Reduction
from ddpcomm.reports import Reporter
from ddpcomm.settlement import collect_notices, settle, settle_deferred
from ddpcomm.statistics import Statistics
from ddpcomm.streams import refuse_capture, stream_reader
from ddpcomm.timeline import Timeline
from ddpcomm.tunable import Tunable
from ddpcomm.turns import Turn

_DEVICE_LIMIT = timedelta(minutes=30)


class Reducer(Failure, Interruption, Tunable, OtherRanks):
    """Averages the gradients of a module's parameters over the ranks of a communicator, during backward.

    Making one is local, apart from what its communicator's `empty` needs. Every backward that synchronises is collective.

    Args:
        module: whose parameters.
        communicator: over which ranks. The reducer doesn't own it.
        options: the same on all ranks.
        ignored: names of parameters to leave alone.
        delayed: names of parameters to send last.
        tag: tells models apart that share a communicator; the same on all ranks.
        wants_synchronization: whether a backward that no forward announced is to synchronise.
        statistics: where to record times.
        reports: tells the other ranks of exceptions here, and explains theirs.
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
        reports: Reporter | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.communicator = communicator
        self.options = options
        self.ignored = frozenset(ignored)
        self.divisor = float(communicator.world_size)
        self.hook: CommHook | None = None
        self.wire_dtype: torch.dtype | None = None
        self.learned = False
        """Whether the order in which gradients become ready is known."""
        self.backwards = 0
        self.statistics = statistics or Statistics()
        self.reports = reports or Reporter()
        self.record = Record(self.statistics, keep_counts=options.find_unused_parameters)
        self.after_average: list[Callable[[], None]] = []
        self.wait_for: list[Any] = []
        self.warns_of_unused = not (options.find_unused_parameters or options.static_graph)
        self.late: set[int] = set()
        self.failure: DDPCommError | None = None
        self.timeline: Timeline | None = None
        self._delayed = frozenset(delayed)
        self.defers_status = communicator.device.type != "cpu" and not options.check_at_once
        self.deferred: DeferredStatus | None = None
        self._tag = tag
        self._wants_synchronization = wants_synchronization
        self._turn = Turn()
        self.mode = Mode.IDLE
        self._requested = False
        self.changed = False
        self._ready_order: list[int] = []
        self.under_way: Reduction | None = None
        """The reduction of the backward under way."""
        self.watch = BackwardWatch(self._begin, self._end, self._on_loss, self._likely_first)
        self.countdown = Countdown(self._launch_full, self._on_uncounted, stream_reader(communicator.device))
        self._foreign = ForeignHooks(self._holds_back)
        self.parameters = ParameterSet(module, self.ignored)
        self._order = self.parameters.launch_order((), self._delayed)
        self.arrangement = self._new_arrangement()
        self._attach({})  # last: where there is no memory for buckets, no hooks are left

    # ---- which parameters, in which buckets -------------------------------------------------------------------------

    def adopt(self, parameters: ParameterSet, ready_order: Sequence[str], fires: Mapping[str, int]) -> None:
        """Hooks `parameters` and lays them out. Local.

        Args:
            parameters: all of them.
            ready_order: names, in the order in which gradients become ready, as far as is known.
            fires: how often each is known to receive a gradient in a backward.
        """
        self.parameters = parameters
        self._order = self.parameters.launch_order(ready_order, self._delayed)
        self._attach(fires)
        self.arrange()

    def _attach(self, fires: Mapping[str, int]) -> None:
        self._foreign.close()
        self.countdown.attach(self.parameters.parameters, [fires.get(name, 1) for name in self.parameters.names])
        self._foreign.watch(self.parameters.parameters)

    def arrange(self) -> None:
        """Makes the buckets for the present parameters, order, hook and wire format. Local; gradients that are views move along."""
        former, self.arrangement = self.arrangement, self._new_arrangement()
        if self.options.gradient_as_bucket_view:
            self.arrangement.take_over(former)

    def _new_arrangement(self) -> Arrangement:
        managed, caps = self.parameters.managed, self.options.caps
        if self.bucket_ends is not None:
            caps = replace(caps, ends=self.parameters.indices(self.bucket_ends))
        self._in_order = [managed[index].parameter for index in self._order]
        return Arrangement(managed, self._order, caps, self.communicator, wire_dtype=self.wire_dtype, apart=self.hook is not None)

    def hook_again(self) -> None:
        """Hooks the parameters once more, after some have lost theirs."""
        self.countdown.give_hooks_back()
        self._attach(dict(zip(self.parameters.names, self.countdown.expected, strict=True)))

    def unhook(self) -> None:
        """Takes the hooks off the parameters: gradients stay this rank's own from then on. Idempotent."""
        self._foreign.close()
        self.countdown.detach()

    def close(self) -> None:
        """Takes the hooks off the parameters, forgets a backward under way and lets go of the buckets' memory. Idempotent."""
        self.unhook()
        self.watch.close()
        self._rest()
        self.deferred = None
        self.closed = True
        if self.timeline is not None:
            self.timeline.close()
        if self.tuner is not None:
            self.tuner.close()
        self.arrangement.close()

    # ---- a backward begins ------------------------------------------------------------------------------------------

    def prepare_forward(self) -> None:
        """Ends what an interrupted backward left open. Collective only then."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self.mode is not Mode.IDLE:
            self._on_interrupt()
        self._recover()
        self.hear_deferred()

    def hear_deferred(self) -> None:
        """Reads the status words of the last backward, if that was put off. Collective, if some rank had something to say."""
        self.communicator.check()
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            settle_deferred(self, deferred.read(self.communicator.timeout or _DEVICE_LIMIT))

    def request_synchronization(self, outputs: Sequence[Tensor]) -> None:
        """The next backward synchronises, though the forward before it was run under no_sync."""
        self._requested = True
        self.watch.watch(outputs, True)

    def fail_at_end(self, error: DDPCommError) -> None:
        """Keeps an error of this rank's until the end of the next backward that synchronises, where all ranks raise it."""
        self.failure = self.failure or error.with_traceback(None)  # which would keep this reducer alive

    def _likely_first(self) -> Sequence[Tensor]:
        """The parameters, the one first that is likely to receive the first gradient."""
        return self._in_order

    def _begin(self, synchronize: bool) -> None:
        synchronize = synchronize or self._requested
        if self.mode is Mode.IDLE:
            self._open(synchronize)
        elif synchronize and self.mode is Mode.LOCAL:
            self._open_synchronizing(may_overlap=False)  # one of several outputs asks for it, and speaks for all

    def _open(self, synchronize: bool) -> None:
        self._recover()
        self.hear_deferred()
        self._foreign.look()
        self._ready_order = []
        if not synchronize:
            self.mode = Mode.LOCAL
            return
        # Of two that average the same gradients, the second starts from what the first has put in place: averages of averages.
        holds_back = self.holds_buckets_back or self._foreign.in_company
        self._open_synchronizing(may_overlap=self.learned and not holds_back)

    def _open_synchronizing(self, *, may_overlap: bool) -> None:
        self.require_usable()
        refuse_capture(self.communicator.device)
        self.changed = self.parameters.replaced_or_unfrozen()
        if self.changed:
            self._foreign.watch(ParameterSet(self.module, self.ignored).parameters)
        waits_for_another = self._turn.begin(self.communicator.shares_order_with)
        mode = self.mode = Mode.OVERLAPPED if may_overlap and not self.changed and not waits_for_another else Mode.DELAYED
        self.backwards += 1
        self.record.complete = False
        self.statistics.backward_starts()
        self.under_way = self.new_reduction()
        if self.timeline is not None:
            self.under_way.recording = self.timeline.step(self.arrangement)
        if mode is Mode.OVERLAPPED:
            self.countdown.arm(self.under_way.arrangement)

    def new_reduction(self, arrangement: Arrangement | None = None) -> Reduction:
        """One pass over the buckets, or over those of another arrangement, which the transport reduces without a hook."""
        screen = None if self.options.nonfinite == "ignore" else Screen(self.communicator.device.type == "cpu")
        view, hook = self.options.gradient_as_bucket_view, self.hook
        if arrangement is not None:
            view, hook = False, None
        chosen = arrangement or self.arrangement
        return Reduction(
            chosen,
            self.communicator,
            divisor=self.divisor,
            hook=hook,
            as_view=view,
            tag=self._tag,
            screen=screen,
            tell=self.reports.raised,
        )

    # ---- gradients arrive -------------------------------------------------------------------------------------------

    def _launch_full(self) -> None:
        reduction = self.under_way
        if reduction is None:
            return
        if reduction.recording is not None:
            reduction.recording.look_for_full(self.countdown.is_full)
        while reduction.next < reduction.arrangement.last and self.countdown.is_full(reduction.next):
            self.statistics.bucket_launched()
            try:
                reduction.launch(producers=self.countdown.streams(reduction.next))
            except CommunicationError as error:
                self.reports.explain(error)
                raise

    def _on_uncounted(self, index: int) -> None:
        """A gradient that the countdown doesn't expect: the first of a backward that nobody announced, any while nothing is armed, one more
        than was known."""
        if self.mode is Mode.IDLE:
            self.countdown.forget(index)
            if self._start_unannounced() is not Mode.OVERLAPPED:
                self._ready_order.append(index)
            self.countdown.recount(index)
        elif self.mode is not Mode.OVERLAPPED:
            self._ready_order.append(index)
        elif self.under_way is not None and self.under_way.has_launched(index):
            self.late.add(index)

    def _start_unannounced(self) -> Mode:
        self.watch.started_by_parameter()
        self._begin(self._wants_synchronization())
        return self.mode

    def _holds_back(self) -> bool:
        """Whether a hook of the user's has to wait for the average."""
        mode = self._start_unannounced() if self.mode is Mode.IDLE else self.mode
        return mode is not Mode.LOCAL

    # ---- a backward ends --------------------------------------------------------------------------------------------

    def _end(self) -> None:
        mode, reduction, fires = self.mode, self.under_way, self.countdown.fires()
        if mode is Mode.LOCAL:
            self.record.gradients_are_own(self.parameters, fires, "accumulated without synchronisation, as under no_sync")
        if mode is Mode.IDLE or mode is Mode.LOCAL or reduction is None:
            self._rest()
            return
        try:
            self._synchronize(reduction, fires)
        except DDPCommError as error:
            if not reduction.all_sent and not isinstance(error, CommunicationError):
                self._on_interrupt(error)  # the other ranks wait for the rest
                raise
            self.reports.explain(error)
            name_cause(error, reduction.failure)
            self.broken = error if isinstance(error, CommunicationError) else self.broken
            self.statistics.error = f"{type(error).__name__}: {error}"
            self.record.gradients_are_own(self.parameters, self._spoilt(fires), f"not averaged: {error}")
            self._foreign.drop_waiting()
            self._rest()
            raise
        except BaseException as error:
            self._on_interrupt(error)
            raise
        self._rest()
        try:
            self._foreign.run_waiting(self.record.brought)
            for run in self.after_average:
                run()
        finally:
            self._tune(took_part=True)

    def _rest(self) -> None:
        self.mode = Mode.IDLE
        self._turn.end()
        if self.under_way is not None:
            self.under_way.failure = None  # its frames hold on to the reduction
        self.under_way = None
        self._requested = False
        self.failure = None
        self.late.clear()
        self.countdown.rest()

    def _synchronize(self, reduction: Reduction, fires: Sequence[int]) -> None:
        self.statistics.gradients_complete()
        if reduction.recording is not None:
            reduction.recording.mark("complete")
        used = [True] * len(fires)
        if 0 in fires:
            used = [count > 0 or self.record.is_own(p) for count, p in zip(fires, self.parameters.parameters, strict=True)]
        skip = self.options.skip_unused_buckets
        reduction.launch_rest(used, lambda: collect_notices(self, reduction, fires), void=False, skip_unused=skip)
        if reduction.absent:
            used = [flag and index not in reduction.absent for index, flag in enumerate(used)]
        settle(self, reduction, used, fires, void=False)
        for future in self.wait_for:
            future.wait()
        self.wait_for.clear()
        self.statistics.buckets_reduced = reduction.launched
        self.statistics.ready_order = self.ready_order()
        self.statistics.communication_ends()
        if reduction.recording is not None:
            reduction.recording.finish()

    def shadow(self) -> None:
        """Takes part, with zeros, in a backward of the other ranks: this one has run out of input. Collective."""
        self.require_usable()
        self.prepare_forward()
        self.backwards += 1
        nothing = [0] * len(self.parameters.managed)
        used = [False] * len(nothing)
        reduction = self.new_reduction()
        reduction.launch_rest(used, set, void=True, skip_unused=self.options.skip_unused_buckets)
        settle(self, reduction, used, nothing, void=True)
        self._tune(took_part=False)

    def skip_step(self, *, void: bool) -> None:
        """Takes all gradients away, so that no optimizer does anything; unless they had no part in it (`void`). All ranks must do so."""
        self._foreign.drop_waiting()
        self.statistics.nonfinite_steps += 1
        if not void:
            self.record.forget()
            for parameter in self.parameters.parameters:
                parameter.grad = None

    def ready_order(self) -> list[int]:
        """The parameters in the order in which their gradients became ready: in this backward, or as last learned."""
        return list(dict.fromkeys(reversed(self._ready_order)))[::-1] or self._order
