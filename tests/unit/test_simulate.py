"""The simulator's rules, by hand and in general."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcomm.cost_model import LinearCost
from ddpcomm.errors import ConfigurationError
from ddpcomm.layout import Caps, ParameterSize, assign, plan
from ddpcomm.simulate import Exchange, StepProfile, simulate
from ddpcomm.status import STATUS_NUMEL

EACH = Caps((1,))  # a bucket a parameter
ONE = Caps((1 << 60,))


def size_of(numel: int) -> ParameterSize:
    return ParameterSize(numel, 4, "gradients")


def profile(*ready: float, backward: float | None = None, numel: int = 1024) -> StepProfile:
    """Parameters that are ready at these times, registered in the reverse order."""
    times = tuple(reversed(ready))
    return StepProfile(tuple(size_of(numel) for _ in times), times, max(ready) if backward is None else backward, 10.0)


class Fixed:
    """Every all-reduce takes as long, and all of it is latency, or none."""

    def __init__(self, seconds: float, latency: bool = False) -> None:
        self._seconds = seconds
        self._latency = latency

    def seconds(self, size_bytes: float) -> float:
        return self._seconds if size_bytes or self._latency else 0.0


profiles = st.lists(st.tuples(st.integers(1, 5000), st.floats(0.0, 1.0)), min_size=1, max_size=7).map(
    lambda found: StepProfile(tuple(size_of(numel) for numel, _ in found), tuple(ready for _, ready in found), 1.0, 0.5)
)
exchanges = st.builds(
    Exchange,
    st.builds(LinearCost, st.floats(0.0, 0.1), st.floats(1e3, 1e6)),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.floats(0.0, 0.01),
    st.floats(1e5, 1e7),
    st.floats(1e5, 1e7),
    st.booleans(),
)


def test_hidden_and_exposed() -> None:
    """Two all-reduces of 2 s: the first beside backward, the second after it."""
    found = simulate(profile(1.0, 4.0), EACH, Exchange(Fixed(2.0)))
    assert [(b.ready_seconds, b.launched_seconds, b.started_seconds, b.ended_seconds) for b in found.buckets] == [
        (1.0, 1.0, 1.0, 3.0),
        (4.0, 4.0, 4.0, 6.0),
    ]
    assert (found.backward_seconds, found.exposed_seconds, found.step_seconds) == (6.0, 2.0, 16.0)
    assert found.communication_seconds == 4.0


def test_buckets_wait_for_those_before_them() -> None:
    """Strictly by index, and one after another on the communicator."""
    late_first = StepProfile((size_of(1024), size_of(1024)), (1.0, 3.0), 3.0)
    found = simulate(late_first, EACH, Exchange(Fixed(5.0)), order=[1, 0])
    assert [b.launched_seconds for b in found.buckets] == [3.0, 3.0]
    assert [b.started_seconds for b in found.buckets] == [3.0, 8.0]


def test_the_last_bucket_waits_for_the_end_of_backward() -> None:
    found = simulate(profile(1.0, 2.0, backward=9.0), EACH, Exchange(Fixed(1.0)))
    assert [b.launched_seconds for b in found.buckets] == [1.0, 9.0]


def test_without_overlap_all_wait() -> None:
    found = simulate(profile(1.0, 2.0, backward=9.0), EACH, Exchange(Fixed(1.0), overlap=False))
    assert [b.launched_seconds for b in found.buckets] == [9.0, 9.0]
    assert found.backward_seconds == 11.0


def test_contention_slows_backward_down() -> None:
    """The second gradient needs 3 s more of backward; 2 s pass at half speed beside the first all-reduce."""
    found = simulate(profile(1.0, 4.0), EACH, Exchange(Fixed(2.0), contention=0.5))
    assert [b.launched_seconds for b in found.buckets] == [1.0, 5.0]
    stopped = simulate(profile(1.0, 4.0), EACH, Exchange(Fixed(2.0), contention=1.0))
    assert [b.launched_seconds for b in stopped.buckets] == [1.0, 6.0]


@pytest.mark.parametrize(("latency", "ends"), [(True, [3.0, 4.0, 5.0]), (False, [4.0, 5.0, 6.0])])
def test_communicators_share_bandwidth_and_not_latency(latency: bool, ends: list[float]) -> None:
    """Three all-reduces of 2 s, launched at 1, 2 and 3: latencies side by side, bytes at half the speed two at a time."""
    found = simulate(profile(1.0, 2.0, 3.0), EACH, Exchange(Fixed(2.0, latency), communicators=2 if not latency else 3))
    expected = ends if latency else [4.0, 6.0, 7.0]
    assert [b.ended_seconds for b in found.buckets] == pytest.approx(expected)


def test_local_work() -> None:
    """1024 floats, a flag and the status: copied in before the bucket goes out, copied out at the end."""
    size_bytes = 4 * (1024 + 1 + STATUS_NUMEL)
    exchange = Exchange(Fixed(2.0), bucket_seconds=0.5, flatten_bytes_per_second=size_bytes, unflatten_bytes_per_second=size_bytes / 3)
    found = simulate(profile(4.0), ONE, exchange)
    assert found.buckets[0].launched_seconds == pytest.approx(4.0 + 0.5 + 1.0)
    assert found.backward_seconds == pytest.approx(5.5 + 2.0 + 3.0)


@settings(max_examples=60, deadline=None)
@given(profiles, exchanges, st.integers(1, 20_000))
def test_in_general(step: StepProfile, exchange: Exchange, cap: int) -> None:
    """The buckets are the reducer's own; nothing happens before its time, and nothing is lost."""
    caps = Caps((cap,))
    found = simulate(step, caps, exchange)
    layouts = plan(step.sizes, assign(step.sizes, step.order, caps), STATUS_NUMEL, control=size_of(0))
    assert [b.parameters for b in found.buckets] == [tuple(slot.parameter for slot in layout.slots) for layout in layouts]
    assert [b.size_bytes for b in found.buckets] == [layout.total_numel * 4 for layout in layouts]
    launched = [b.launched_seconds for b in found.buckets]
    assert launched == sorted(launched)
    for b in found.buckets:
        assert b.ready_seconds - 1e-9 <= b.launched_seconds <= b.started_seconds <= b.ended_seconds
        assert b.ended_seconds - b.started_seconds >= exchange.cost.seconds(b.size_bytes) - 1e-9
    assert found.backward_seconds >= max(b.ended_seconds for b in found.buckets)
    assert found.exposed_seconds >= -1e-12
    alone = sum(exchange.cost.seconds(b.size_bytes) + exchange.local_seconds(b.size_bytes) for b in found.buckets)
    copied_out = sum(b.size_bytes for b in found.buckets) / exchange.unflatten_bytes_per_second
    assert found.backward_seconds <= step.backward_seconds + alone + copied_out + 1e-9
    if exchange.communicators == 1 and exchange.contention == 1.0 and exchange.overlap:
        assert found.backward_seconds == pytest.approx(step.backward_seconds + alone + copied_out)


@settings(max_examples=30, deadline=None)
@given(profiles, exchanges)
def test_overlap_never_hurts(step: StepProfile, exchange: Exchange) -> None:
    """Not with one communicator; several get in each other's way in another manner."""
    one = replace(exchange, communicators=1)
    with_it, without = (simulate(step, EACH, replace(one, overlap=overlap)).backward_seconds for overlap in (True, False))
    assert with_it <= without + 1e-9


def test_no_parameters() -> None:
    assert simulate(StepProfile((), (), 1.0), EACH, Exchange(Fixed(2.0))).backward_seconds == 3.0


def test_inputs_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="1 parameters, but 0 times"):
        StepProfile((size_of(1),), (), 1.0)
    with pytest.raises(ConfigurationError, match="parameter 0 is ready after 2"):
        StepProfile((size_of(1),), (2.0,), 1.0)
    with pytest.raises(ConfigurationError, match="one communicator or more"):
        Exchange(Fixed(1.0), communicators=0)
    with pytest.raises(ConfigurationError, match="contention"):
        Exchange(Fixed(1.0), contention=1.5)
