"""A timeline over the nccl transport: events on the streams where things run, and nothing else that was not there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ddpcomm
from ddpcomm.trace import RankTrace, read
from tests.comm.hazards import Entry
from tests.comm.kernels_on_streams import kernels_written_down
from tests.comm.nccl_over_gloo import nccl_over_gloo
from tests.comm.test_nccl_ddp import KIB, Net, inputs
from tests.rank_process import RankContext
from tests.ranks import RankPool

STEPS = 2


def train(context: RankContext, path: Path | None) -> tuple[list[str], list[str]]:
    """Everything put on streams or done to the device within the timeline; and of which kinds what a timeline itself added is."""
    communicator, recorder = nccl_over_gloo(context, communicators=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpcomm.ddp.create_communicator", lambda *arguments, **options: communicator)
        net = ddpcomm.DistributedDataParallel(Net(), bucket_cap_mb=KIB, init_sync=False)
    net(inputs(context.rank, 0), spare=True).sum().backward()
    recorder.runtime.idle = False
    with kernels_written_down(recorder):
        if path is None:
            entries = steps(net, context.rank, recorder.trace)
        else:
            recorder.runtime.idle = True
            with net.timeline(path):
                recorder.runtime.idle = False
                entries = steps(net, context.rank, recorder.trace)
                recorder.runtime.idle = True
    recorder.runtime.idle = True
    net.close()
    first = next((i for i, entry in enumerate(entries) if entry.kind in ("work", "record", "wait")), 0)
    return [str(entry) for entry in entries if entry.kind in ("work", "record", "wait")], [entry.kind for entry in entries[first:]]


def steps(net: Any, rank: int, trace: list[Entry]) -> list[Entry]:
    before = len(trace)
    for number in range(STEPS):
        net.zero_grad()
        net(inputs(rank, number), spare=True).sum().backward()
    return trace[before:]


@pytest.fixture(scope="module")
def traces(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], list[RankTrace]]:
    path = tmp_path_factory.mktemp("nccl") / "trace.json"
    plain, recorded = two_ranks.run(train, None), two_ranks.run(train, path)
    return plain, recorded, read(path)


def test_streams_are_given_the_same_work(traces: tuple[list[Any], list[Any], list[RankTrace]]) -> None:
    plain, recorded, _ = traces
    for (before, kinds_before), (after, kinds_after) in zip(plain, recorded, strict=True):
        assert after == before
        assert sum("all_reduce" in line for line in before) == 2 * STEPS
        assert "time" not in kinds_before
        assert "time" in kinds_after
        assert "synchronize" not in kinds_after  # the host never waits for the device once a step has begun


def test_all_reduces_have_the_times_of_their_streams(traces: tuple[list[Any], list[Any], list[RankTrace]]) -> None:
    for trace in traces[2]:
        assert (trace.steps, trace.transport) == (STEPS, "nccl")
        tracks = {event["args"]["bucket"]: event["tid"] for event in trace.events if event["cat"] == "all_reduce"}
        assert len(tracks) == 2
        assert len(set(tracks.values())) == 2  # two communicators take turns, each with a stream
        assert all(track.startswith("stream ") for track in tracks.values())
        for number in range(STEPS):
            own = {event["name"]: event for event in trace.events if event["args"]["step"] == number}
            for bucket in tracks:
                flatten, reduce, wait = (own[f"{what} {bucket}"] for what in ("flatten", "all-reduce", "wait"))
                # On the recorder's device every event comes after the one before: nothing lies between these two.
                assert reduce["ts"] > flatten["ts"] + flatten["dur"]
                assert reduce["ts"] + reduce["dur"] < wait["ts"]
            assert own["exposed"]["ts"] == own["backward"]["ts"] + own["backward"]["dur"]
