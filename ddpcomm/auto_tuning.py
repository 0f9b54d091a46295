"""`bucket_cap_mb="auto"`: buckets from what the first backwards show, measured beside the default ones, and kept if they are faster.

It goes by the backwards that synchronise, which all ranks count alike, and acts at the end of one, where all ranks are:

| backwards | what happens |
|---|---|
| 4 | nothing: the reducer learns the order, memory is touched for the first time |
| 5 | the default buckets are timed |
| 5 | buckets go out only when backward has ended, so that the times at which gradients become ready are backward's own |
| - | all-reduces are timed, the ranks exchange their times, and all choose the same plan from the slowest rank's |
| 2 x (2 x 6) | the plan's buckets and the default ones take turns, six backwards each, of which the first doesn't count |
| 2 x (2 x 6) for each candidate | options of the transport that are "auto" take turns with what is in use: see `transport_tuning` |

With a size or a plan given, and only options "auto", the first four and the last are all there is.

Where the ranks' own threads move the bytes, backward stands still meanwhile. How far that is so is fitted to the default buckets' times, on
which the choice isn't judged.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from ddpcomm.all_reduce_times import measure_cost, synchronize
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.layout import Caps
from ddpcomm.layout_check import require_same_layout
from ddpcomm.ready_times import BackwardProfile, profile_backwards
from ddpcomm.simulate import Exchange, StepProfile, simulate
from ddpcomm.transport_tuning import TransportTuner
from ddpcomm.tuning import Plan, choose

if TYPE_CHECKING:
    from ddpcomm.cost_model import MeasuredCost
    from ddpcomm.reducer import Reducer
    from ddpcomm.transport_choice import TransportChoice

_log = logging.getLogger(__name__)
_SETTLING, _TIMED, _PROFILED, _TURNS, _TURN = 4, 5, 5, 2, 6
_MOST_PROFILES = 10
_MOST_ATOMS = 128
"""The search takes a second with so many; with more, runs of small gradients are not cut."""
_MOST_COPIED_BYTES = 16 << 20
_LEAST_GAIN = 0.01  # of backward: what doesn't save so much isn't worth leaving the sizes that everybody knows
_CONTENTIONS = tuple(part / 8 for part in range(9))

Steps = Generator[None, None, None]


class AutoTuner:
    """Tunes the buckets of one reducer, and its transport's undecided options, once.

    Args:
        model: whose transport.
        reducer: whose buckets. It must call `backward_ended` after every backward that synchronised, on all ranks.
        done: called with the plan that was chosen; None where the default buckets and options are as good.
        buckets: whether to tune them, too.
    """

    def __init__(self, model: TransportChoice, reducer: Reducer, done: Callable[[Plan | None], None], *, buckets: bool) -> None:
        self._owner = weakref.ref(reducer)
        self._tunes_buckets = buckets
        self._transport = TransportTuner(model, self._turns, _LEAST_GAIN) if model._undecided else None
        self._done = weakref.WeakMethod(done)
        self._took_part = self._present = True
        self._steps: Steps | None = self._tune()
        next(self._steps)

    @property
    def running(self) -> bool:
        return self._steps is not None

    def backward_ended(self, *, took_part: bool) -> None:
        """A backward that synchronised has ended well. Collective, now and then.

        Args:
            took_part: False on a rank that has run out of input, and was there for the others' sake.

        Raises:
            CommunicationError: a collective failed.
        """
        if self._steps is None:
            return
        self._present = took_part
        self._took_part = self._took_part and took_part
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None

    def close(self) -> None:
        """Gives up. Local, idempotent; the buckets stay as they are."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    # ---- what happens, a backward at each yield ---------------------------------------------------------------------

    def _tune(self) -> Steps:
        yield from _pass(_SETTLING)
        texts, plan = [], None
        if self._reducer().hook is not None:
            texts.append("buckets not tuned: a communication hook may keep something for each bucket")
        else:
            if self._tunes_buckets:
                plan, text = yield from self._tune_buckets()
                texts.append(f"buckets {text}")
            if self._transport is not None:
                yield from self._transport.steps()
                texts.append(self._transport.summary())
                if self._transport.chosen:
                    plan = (plan or self._present_plan(self._transport.seconds)).with_options(self._transport.chosen)
        if self._communicator.rank == 0:
            _log.info("%s", "; ".join(texts))
        done = self._done()
        if done is not None:
            done(plan)

    def _tune_buckets(self) -> Generator[None, None, tuple[Plan | None, str]]:
        """The plan that was kept, and what to say of it."""
        default = yield from self._timed(_TIMED)
        profiles = yield from self._profile()
        if not profiles:
            return None, "not tuned: some rank was always out of input"
        plan = self._choose(profiles, median(default))
        if plan is None:
            return None, "stay as they are: nothing better was found"
        tuned, former = yield from self._turns(lambda tuned: self._lay_out(plan if tuned else None))
        return self._conclude(plan, tuned, former)

    def _turns(self, switch: Callable[[bool], None]) -> Generator[None, None, tuple[float, float]]:
        """Median seconds of a backward after `switch(True)` and after `switch(False)`, which take turns."""
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * _TURNS):
            new = turn % 2 == 0
            switch(new)
            yield
            times[new] += yield from self._timed(_TURN - 1)
        return median(times[True]), median(times[False])

    def _timed(self, count: int) -> Generator[None, None, list[float]]:
        """Seconds of so many backwards, with their exchange, on the slowest rank."""
        mine = []
        for _ in range(count):
            yield
            synchronize(self._communicator.device)
            elapsed = (time.perf_counter_ns() - self._reducer().statistics.backward_start) / 1e9
            mine.append(elapsed if self._present else 0.0)
        return [max(times) for times in zip(*all_gather_objects(self._communicator, mine), strict=True)]

    def _profile(self) -> Generator[None, None, list[BackwardProfile]]:
        """Every rank's profile of a typical backward, once all of them have had input the whole time; none if that never happens."""
        for _ in range(_MOST_PROFILES):
            self._took_part = True
            self._reducer().holds_buckets_back = True
            try:
                with profile_backwards(self._reducer()) as profiles:
                    yield from _pass(_PROFILED)
            finally:
                if (owner := self._owner()) is not None:
                    owner.holds_buckets_back = False
                del owner
            mine = _typical(profiles) if self._took_part and profiles else None
            everyone = all_gather_objects(self._communicator, mine)
            found = [profile for profile in everyone if profile is not None]
            if len(found) == len(everyone):
                return found
        return []

    def _choose(self, profiles: Sequence[BackwardProfile], default_seconds: float) -> Plan | None:
        """The best plan; None where it makes the buckets that there are, or some rank has no memory left to find out.

        Collective; every rank computes it from equal figures.
        """
        reducer = self._reducer()
        managed = [member for member in reducer.parameters.managed if not member.sparse]
        if not managed:
            return None
        length = max(profile.compute_seconds for profile in profiles)
        ready = [max(p.ready_seconds.get(member.name, length) for p in profiles) for member in managed]
        step = StepProfile(tuple(m.size(reducer.wire_dtype) for m in managed), tuple(min(r, length) for r in ready), length)
        cost = measure_cost(self._communicator, step.total_bytes)
        mine = _copy_bytes_per_second(step.total_bytes, reducer.communicator.device)
        rates = [rate for rate in all_gather_objects(self._communicator, mine) if rate is not None]
        if len(rates) < self._communicator.world_size:
            return None
        exchange = _fitted(step, cost, min(rates), reducer.options.gradient_as_bucket_view, default_seconds)
        plan = choose(signature(reducer), step, exchange, most_atoms=_MOST_ATOMS)
        bucket_ends = {bucket.members[-1].name for bucket in reducer.arrangement.buckets if bucket.members}
        return None if set(plan.ends) == bucket_ends else plan

    def _lay_out(self, plan: Plan | None) -> None:
        reducer = self._reducer()
        reducer.bucket_ends = None if plan is None else frozenset(plan.ends)
        reducer.arrange()
        require_same_layout(reducer)

    def _conclude(self, plan: Plan, tuned_seconds: float, default_seconds: float) -> tuple[Plan | None, str]:
        kept = tuned_seconds < (1 - _LEAST_GAIN) * default_seconds
        self._lay_out(plan if kept else None)
        measured = f"measured {tuned_seconds * 1e3:.3f} ms beside {default_seconds * 1e3:.3f} ms"
        verdict = "they are kept" if kept else "the default sizes are kept"
        return plan if kept else None, f"tuned: {plan.summary()}; {measured}; {verdict}"

    def _present_plan(self, seconds: float) -> Plan:
        """The buckets as they are, so that options can be saved with them. Collective."""
        reducer = self._reducer()
        names = reducer.parameters.names
        return Plan(
            parameters=tuple(signature(reducer)),
            order=tuple(names[index] for index in reducer.ready_order()),
            ends=tuple(bucket.members[-1].name for bucket in reducer.arrangement.buckets if bucket.members),
            communicators=1,
            cost=measure_cost(self._communicator, max(bucket.buffer.nbytes for bucket in reducer.arrangement.buckets)),
            contention=0.0,
            predicted_seconds=seconds,
            default_seconds=seconds,
        )

    @property
    def _communicator(self) -> Communicator:
        return self._reducer().communicator

    def _reducer(self) -> Reducer:
        reducer = self._owner()
        if reducer is None:  # nobody steps a tuner whose reducer is gone
            raise ReferenceError("the reducer is gone")
        return reducer


def signature(reducer: Reducer) -> list[tuple[str, str]]:
    """The parameters that have a place in buckets, as `Plan.check` compares them: names, and shapes, dtypes and strides as text."""
    return [(m.name, f"{tuple(m.shape)} {m.dtype} {m.strides}") for m in reducer.parameters.managed if not m.sparse]


def _pass(count: int) -> Steps:
    for _ in range(count):
        yield


def _typical(profiles: Iterable[BackwardProfile]) -> BackwardProfile:
    """The one of median length: times of different backwards would not fit together."""
    by_length = sorted(profiles, key=lambda profile: profile.compute_seconds)
    return by_length[len(by_length) // 2]


def _copy_bytes_per_second(size_bytes: int, device: torch.device) -> float | None:
    """None where there is no memory for it, which the other ranks must hear."""
    try:
        source, target = (torch.zeros(max(min(size_bytes, _MOST_COPIED_BYTES) // 4, 1), device=device) for _ in range(2))
    except RuntimeError:
        return None
    times = []
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return source.nbytes / max(min(times), 1e-9)


def _fitted(step: StepProfile, cost: MeasuredCost, bytes_per_second: float, as_view: bool, default_seconds: float) -> Exchange:
    """The contention at which the default buckets would take as long as they did."""
    exchange = Exchange(cost, flatten_bytes_per_second=bytes_per_second)
    if not as_view:
        exchange = replace(exchange, unflatten_bytes_per_second=bytes_per_second)
    tried = [replace(exchange, contention=contention) for contention in _CONTENTIONS]
    return min(tried, key=lambda each: abs(simulate(step, Caps.of_mb(None), each).backward_seconds - default_seconds))
