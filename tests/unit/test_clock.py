"""Clocks: a device's laid over the host's, and one host's over another's."""

from __future__ import annotations

import random

import pytest

from ddpcomm.clock import DeviceClock, HostClock, clock_offset
from tests.comm.recorder import Recorder


def passes(offset: int, *, rounds: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Barriers of two ranks, the second's clock `offset` ahead: each rank leaves some time after the last has entered."""
    chance = random.Random(seed)
    first, second, now = [], [], 1_000_000
    for _ in range(rounds):
        entered = [now + chance.randrange(50_000) for _ in range(2)]
        left = [max(entered) + chance.randrange(1, 30_000) for _ in range(2)]
        first.append((entered[0], left[0]))
        second.append((entered[1] + offset, left[1] + offset))
        now = max(left) + 1000
    return first, second


@pytest.mark.parametrize("offset", [0, 5_000_000, -123_456_789])
def test_offset_is_within_its_error(offset: int) -> None:
    for seed in range(20):
        reference, own = passes(offset, rounds=20, seed=seed)
        found, error = clock_offset(own, reference)
        assert abs(found + offset) <= error
        assert error < 30_000


def test_more_barriers_never_widen_the_error() -> None:
    reference, own = passes(777, rounds=20, seed=1)
    errors = [clock_offset(own[:count], reference[:count])[1] for count in range(1, 21)]
    assert errors == sorted(errors, reverse=True)


def test_host_times_are_as_they_were_read() -> None:
    clock = HostClock()
    instants = [clock.now() for _ in range(3)]
    assert instants == sorted(instants)
    assert clock.host_times([instants, []]) == [instants, []]


def test_device_times_keep_their_proportions() -> None:
    """The recorder's device takes a microsecond from event to event, the host's clock is another: both ends are fixed to it."""
    recorder = Recorder()
    clock = DeviceClock(recorder.runtime)
    clock.start()
    steps = [[clock.now() for _ in range(4)], [clock.on(recorder.runtime.main) for _ in range(3)]]
    clock.finish()
    first, second = clock.host_times(steps)
    gaps = [b - a for a, b in zip(first + second, (first + second)[1:], strict=False)]
    assert min(gaps) > 0
    assert max(gaps) - min(gaps) <= 2  # all alike, but for rounding
    synchronized = [entry.kind for entry in recorder.trace if entry.kind != "time"]
    assert set(synchronized) == {"synchronize"}
    assert [entry.kind for entry in recorder.trace].count("synchronize") == 20  # before and after each anchor, and never in between
