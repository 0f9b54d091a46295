"""What a timeline comes to: how much of the communication was hidden, what was not, which bucket is slow, which rank is late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from ddpcomm.errors import ConfigurationError
from ddpcomm.trace import RankTrace
from ddpcomm.trace_events import Event, bus_bytes

Span = tuple[int, int]


@dataclass(frozen=True)
class RankSummary:
    """One rank; medians over its steps.

    Args:
        backward_ms: from the begin of backward to the last gradient of this rank.
        communication_ms: during which some all-reduce was under way, waits for other ranks included.
        overlap_share: the part of that which lay within backward, from 0 to 1.
        exposed_ms: from the last gradient until all averages were in place.
        wait_ms: the part of the exposed time in which the rank, or its stream, waited for all-reduces.
        lateness_ms: mean over all all-reduces of how long after the first rank this one issued its own.
        last_share: in how much of the all-reduces it was the last.
    """

    rank: int
    steps: int
    backward_ms: float
    communication_ms: float
    overlap_share: float
    exposed_ms: float
    wait_ms: float
    lateness_ms: float
    last_share: float


@dataclass(frozen=True)
class BucketSummary:
    """One bucket; medians over steps and ranks.

    Args:
        ready_ms: after the begin of backward.
        flatten_ms, unflatten_ms: 0 where there is none: averages in the bucket's own memory are not written back.
        all_reduce_ms: from the last rank's begin to the last rank's end: the exchange itself, without waits for late ranks.
        busbw_bytes_per_second: of that; see `trace_events.bus_bytes`.
    """

    bucket: int
    nbytes: int
    parameters: str
    ready_ms: float
    flatten_ms: float
    all_reduce_ms: float
    busbw_bytes_per_second: float
    unflatten_ms: float


@dataclass(frozen=True)
class Summary:
    """All of it. `straggler` is the rank that is late the most, None if there is one rank alone."""

    device: str
    transport: str
    world_size: int
    ranks: list[RankSummary]
    buckets: list[BucketSummary]
    clock_error_ms: float

    @property
    def slowest_bucket(self) -> BucketSummary:
        return max(self.buckets, key=lambda bucket: bucket.all_reduce_ms)

    @property
    def straggler(self) -> RankSummary | None:
        return max(self.ranks, key=lambda rank: rank.lateness_ms) if len(self.ranks) > 1 else None

    @property
    def overlap_share(self) -> float:
        return mean(rank.overlap_share for rank in self.ranks)

    @property
    def exposed_ms(self) -> float:
        """Of the rank that waits the longest, or works the longest to put averages in place."""
        return max(rank.exposed_ms for rank in self.ranks)


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Summarises traces that are on one clock.

    Raises:
        ConfigurationError: they hold no step.
    """
    if not traces or not any(trace.steps for trace in traces):
        raise ConfigurationError("the timeline holds no backward that synchronised and ended well")
    begins: dict[tuple[int, int], dict[int, int]] = {}
    ends: dict[tuple[int, int], dict[int, int]] = {}
    for trace in traces:
        for event in _of(trace.events, "all_reduce"):
            place = event["args"]["step"], event["args"]["bucket"]
            begins.setdefault(place, {})[trace.rank] = event["ts"]
            ends.setdefault(place, {})[trace.rank] = event["ts"] + event["dur"]
    together = {place: by_rank for place, by_rank in begins.items() if len(by_rank) == len(traces)}
    first = traces[0]
    return Summary(
        device=first.device,
        transport=first.transport,
        world_size=first.world_size,
        ranks=[_rank_summary(trace, together) for trace in traces if trace.steps],
        buckets=_bucket_summaries(traces, begins, ends, first.world_size),
        clock_error_ms=max(trace.clock_error_ns for trace in traces) / 1e6,
    )


def _rank_summary(trace: RankTrace, begins: dict[tuple[int, int], dict[int, int]]) -> RankSummary:
    backward = {e["args"]["step"]: (e["ts"], e["ts"] + e["dur"]) for e in trace.events if e["name"] == "backward"}
    exposed = [e["dur"] for e in trace.events if e["name"] == "exposed"]
    reduces: dict[int, list[Span]] = {step: [] for step in backward}
    waits: dict[int, int] = dict.fromkeys(backward, 0)
    for event in _of(trace.events, "all_reduce"):
        reduces[event["args"]["step"]].append((event["ts"], event["ts"] + event["dur"]))
    for event in _of(trace.events, "wait"):
        waits[event["args"]["step"]] += event["dur"]
    busy = {step: _length(spans) for step, spans in reduces.items()}
    hidden = {step: _length((start, min(end, backward[step][1])) for start, end in spans) for step, spans in reduces.items()}
    lags = [by_rank[trace.rank] - min(by_rank.values()) for by_rank in begins.values()]
    last = [by_rank[trace.rank] == max(by_rank.values()) for by_rank in begins.values()]
    return RankSummary(
        rank=trace.rank,
        steps=trace.steps,
        backward_ms=median(end - start for start, end in backward.values()) / 1e6,
        communication_ms=median(busy.values()) / 1e6,
        overlap_share=median(hidden[step] / busy[step] if busy[step] else 0.0 for step in backward),
        exposed_ms=median(exposed) / 1e6,
        wait_ms=median(waits.values()) / 1e6,
        lateness_ms=mean(lags) / 1e6 if lags else 0.0,
        last_share=mean(last) if last else 0.0,
    )


def _bucket_summaries(
    traces: Sequence[RankTrace], begins: dict[tuple[int, int], dict[int, int]], ends: dict[tuple[int, int], dict[int, int]], world_size: int
) -> list[BucketSummary]:
    starts = {(trace.rank, e["args"]["step"]): e["ts"] for trace in traces for e in trace.events if e["name"] == "backward"}
    by_bucket: dict[int, dict[str, list[int]]] = {}
    facts: dict[int, Event] = {}
    for trace in traces:
        for event in trace.events:
            if "bucket" in event["args"]:
                times = by_bucket.setdefault(event["args"]["bucket"], {})
                ready = event["ts"] - starts[trace.rank, event["args"]["step"]]
                times.setdefault(event["cat"], []).append(event.get("dur", ready))
                if event["cat"] == "all_reduce":
                    facts[event["args"]["bucket"]] = event["args"]
    found = []
    for bucket in sorted(facts):
        exchanges = [max(ends[place].values()) - max(begins[place].values()) for place in begins if place[1] == bucket]
        length = max(median(exchanges), 1)
        times, nbytes = by_bucket[bucket], facts[bucket]["bytes"]
        medians = {what: median(times.get(what, [0])) / 1e6 for what in ("ready", "flatten", "unflatten")}
        found.append(
            BucketSummary(
                bucket=bucket,
                nbytes=nbytes,
                parameters=facts[bucket]["parameters"],
                ready_ms=medians["ready"],
                flatten_ms=medians["flatten"],
                all_reduce_ms=length / 1e6,
                busbw_bytes_per_second=bus_bytes(nbytes, world_size) / length * 1e9,
                unflatten_ms=medians["unflatten"],
            )
        )
    return found


def _of(events: Iterable[Event], category: str) -> list[Event]:
    return [event for event in events if event["cat"] == category]


def _length(spans: Iterable[Span]) -> int:
    """Of the union of spans; one that ends before it begins is none."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        if end > max(start, reached):
            total += end - max(start, reached)
            reached = end
    return total
