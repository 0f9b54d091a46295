"""`timeline()`: it writes down what happens, and changes nothing of it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcomm
from ddpcomm.ops import FlattenPlan
from ddpcomm.ready_times import profile_backwards
from ddpcomm.trace import merge, read
from ddpcomm.trace_summary import summarize
from tests.ddp.models import chain
from tests.rank_process import RankContext
from tests.ranks import RankPool

TRANSPORTS = ("process_group", "shared_memory", "hierarchical")
STEPS = 3


class Calls:
    """Writes down what a model launches: kernels, collectives, waits and progress, with their sizes; not what a transport calls. Whether
    a bucket's own share is copied depends on which rank comes first, and is not told apart."""

    def __init__(self, ddp: ddpcomm.DistributedDataParallel) -> None:
        self.found: list[tuple[Any, ...]] = []
        self._communicator = ddp._communicator
        self._depth = 0

    @contextlib.contextmanager
    def written_down(self) -> Any:
        communicator = self._communicator
        with pytest.MonkeyPatch.context() as patch:
            for name in ("flatten", "flatten_around", "unflatten", "norm"):
                patch.setattr(FlattenPlan, name, self._noted(name.removesuffix("_around"), getattr(FlattenPlan, name)))
            for name in ("broadcast", "all_gather", "reduce_scatter", "barrier", "progress", "check", "empty"):
                patch.setattr(communicator, name, self._noted(name, getattr(communicator, name)), raising=False)
            work = type(communicator.all_reduce(torch.ones(1)))
            for name in ("all_reduce", "all_reduce_from"):
                patch.setattr(communicator, name, self._noted("all_reduce", getattr(communicator, name)))
            for name in ("wait", "is_completed"):
                patch.setattr(work, name, self._noted(name, getattr(work, name)))
            yield

    def _noted(self, name: str, function: Any) -> Any:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if self._depth == 0:
                told = [argument for argument in arguments if isinstance(argument, (Tensor, str))]
                self.found.append((name, *[each.numel() if isinstance(each, Tensor) else each for each in told]))
            self._depth += 1
            try:
                return function(*arguments, **keywords)
            finally:
                self._depth -= 1

        return noted


def wrap(transport: str, **options: Any) -> ddpcomm.DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))
    return ddpcomm.DistributedDataParallel(model, transport=transport, bucket_cap_mb=0.003, **options)


def step(ddp: nn.Module, rank: int, number: int = 0) -> None:
    ddp.zero_grad()
    ddp(torch.arange(16.0).view(2, 8) + rank + number).square().sum().backward()


def gradients(ddp: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def with_and_without(context: RankContext, transport: str, view: bool, directory: Path) -> list[tuple[list[Any], list[Tensor]]]:
    found = []
    for recorded in (False, True, False):
        ddp = wrap(transport, gradient_as_bucket_view=view)
        for number in range(2):
            step(ddp, context.rank, number)
        calls = Calls(ddp)
        with ddp.timeline(directory / "trace.json") if recorded else contextlib.nullcontext(), calls.written_down():
            for number in range(STEPS):
                step(ddp, context.rank, number)
        found.append((calls.found, gradients(ddp)))
        ddp.close()
    return found


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_else_is_executed(two_ranks: RankPool, transport: str, view: bool, tmp_path: Path) -> None:
    for (before, own), (recorded, with_timeline), (after, _) in two_ranks.run(with_and_without, transport, view, tmp_path):
        assert len([call for call in before if call[0] == "flatten"]) == 3 * STEPS
        assert len([call for call in before if call[0] == "all_reduce"]) == 3 * STEPS
        assert recorded == before == after
        assert all(map(torch.equal, own, with_timeline))


def record(context: RankContext, transport: str, path: Path) -> None:
    ddp = wrap(transport)
    step(ddp, context.rank)
    with ddp.timeline(path):
        for number in range(STEPS):
            with ddp.no_sync():
                step(ddp, context.rank, number)  # leaves no step behind
            step(ddp, context.rank, number)
    step(ddp, context.rank)
    ddp.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trace_tells_what_each_bucket_did(two_ranks: RankPool, transport: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    two_ranks.run(record, transport, path)
    traces = read(path)
    assert [(trace.rank, trace.steps, trace.transport) for trace in traces] == [(rank, STEPS, transport) for rank in range(2)]
    assert traces[0].clock == traces[1].clock
    for trace in traces:
        for number in range(STEPS):
            own = [event for event in trace.events if event["args"]["step"] == number]
            at = {event["name"]: event["ts"] for event in own}
            end = {event["name"]: event["ts"] + event.get("dur", 0) for event in own}
            assert end["forward"] == at["backward"] <= end["backward"] == at["exposed"]
            for bucket in range(3):
                assert at["backward"] <= at[f"bucket {bucket} ready"] <= at[f"flatten {bucket}"] <= end[f"flatten {bucket}"]
                assert end[f"flatten {bucket}"] <= at[f"all-reduce {bucket}"] <= end[f"all-reduce {bucket}"] <= end[f"wait {bucket}"]
                assert end[f"wait {bucket}"] <= at[f"unflatten {bucket}"] <= end[f"unflatten {bucket}"] <= end["exposed"]
            assert at["flatten 0"] < end["backward"]  # it went out while backward ran
    summary = summarize(traces)
    assert [bucket.parameters for bucket in summary.buckets] == ["4.bias, 4.weight", "2.bias, 2.weight", "0.bias, 0.weight"]
    assert all(bucket.nbytes > 4 * numel for bucket, numel in zip(summary.buckets, (1204, 90300, 2700), strict=True))


def no_rank_begins_after_another_has_ended(path: Path) -> bool:
    """All-reduces synchronise: on one clock, each rank's begins before any rank's ends."""
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for trace in read(path):
        for event in trace.events:
            if event["cat"] == "all_reduce":
                spans.setdefault((event["args"]["step"], event["args"]["bucket"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return all(max(start for start, _ in each) <= min(end for _, end in each) for each in spans.values())


def test_ranks_are_on_one_clock(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(record, "process_group", tmp_path / "trace.json")
    assert no_rank_begins_after_another_has_ended(tmp_path / "trace.json")


def record_on_other_hosts(context: RankContext, path: Path) -> None:
    """The second rank's clock has another name, and is ten seconds ahead."""
    import time

    read_clock = time.perf_counter_ns
    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:
            patch.setattr("time.perf_counter_ns", lambda: read_clock() + 10_000_000_000)
        patch.setattr("ddpcomm.timeline.host_clock_name", lambda: f"host {context.rank}")
        record(context, "process_group", path)


def test_clocks_of_other_hosts_are_aligned(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    two_ranks.run(record_on_other_hosts, path)
    starts = [min(event["ts"] for event in trace.events) for trace in read(path)]
    assert abs(starts[0] - starts[1]) < 5_000_000_000
    assert 0 < read(path)[1].clock_error_ns < 100_000_000
    assert no_rank_begins_after_another_has_ended(path)


def fail_inside(context: RankContext, path: Path) -> str:
    ddp = wrap("process_group")
    try:
        with ddp.timeline(path):
            step(ddp, context.rank)
            raise KeyError("mine")
    except KeyError as error:
        return str(error)


def test_an_exception_leaves_each_rank_its_own_file(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(fail_inside, tmp_path / "trace.json") == ["'mine'"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    assert [trace.steps for trace in merge(sorted(tmp_path.iterdir()))] == [1, 1]


def interrupt(context: RankContext, path: Path) -> None:
    ddp = wrap("process_group")

    def fail(_: Tensor) -> None:
        raise ValueError("interrupted")

    step(ddp, context.rank)
    with ddp.timeline(path):
        step(ddp, context.rank)
        handle = ddp.module[2].weight.register_hook(fail) if context.rank == 0 else None
        with pytest.raises(ValueError if context.rank == 0 else ddpcomm.errors.BackwardInterruptedError):
            step(ddp, context.rank)
        if handle is not None:
            handle.remove()
        step(ddp, context.rank)


def test_interrupted_backwards_are_left_out(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(interrupt, tmp_path / "trace.json")
    for trace in read(tmp_path / "trace.json"):
        assert sorted({event["args"]["step"] for event in trace.events}) == [0, 2]


def train_with_variable(context: RankContext, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPCOMM_TIMELINE", str(path))
        ddp = wrap("process_group")
    step(ddp, context.rank)
    with ddp.timeline(path.with_name("inner.json")):  # takes its place meanwhile
        step(ddp, context.rank)
    step(ddp, context.rank)
    ddp.close()


def test_environment_variable(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(train_with_variable, tmp_path / "trace.json")
    own = sorted(path.name for path in tmp_path.glob("trace*.rank?.json"))
    assert len(own) == 2
    traces = merge([tmp_path / name for name in own])
    assert [trace.steps for trace in traces] == [2, 2]
    assert [trace.steps for trace in read(tmp_path / "inner.json")] == [1, 1]


def record_hook(context: RankContext, path: Path) -> None:
    ddp = wrap("process_group")
    ddp.register_comm_hook(None, ddpcomm.hooks.fp16)
    step(ddp, context.rank)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    other = wrap("process_group")
    other.register_comm_hook(None, allreduce_hook)
    step(other, context.rank)
    with ddp.timeline(path), other.timeline(path.with_name("torch.json")):
        step(ddp, context.rank)
        step(other, context.rank)


def test_communication_hooks_are_recorded(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(record_hook, tmp_path / "fp16.json")
    # Half the bytes make fewer buckets; beside torch's hooks, flags and status have one of their own.
    for name, buckets in (("fp16", 2), ("torch", 4)):
        for trace in read(tmp_path / f"{name}.json"):
            reduces = [event["args"]["bytes"] for event in trace.events if event["cat"] == "all_reduce"]
            assert len(reduces) == buckets


def profile(context: RankContext) -> Any:
    ddp = ddpcomm.DistributedDataParallel(chain(), transport="process_group")
    data = torch.ones(2, 3)
    ddp(data).sum().backward()
    with profile_backwards(ddp._reducer) as profiles:
        ddp(data).sum().backward()
        with ddp.no_sync():
            ddp(data).sum().backward()
        ddp(data).sum().backward()
    ddp(data).sum().backward()
    return profiles


def test_profiles_tell_when_each_gradient_is_ready(two_ranks: RankPool) -> None:
    for profiles in two_ranks.run(profile):
        assert len(profiles) == 2
        for each in profiles:
            assert set(each.ready_seconds) == {f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
            assert 0 < each.ready_seconds["4.weight"] < each.ready_seconds["2.weight"] < each.ready_seconds["0.weight"]
            assert max(each.ready_seconds.values()) <= each.compute_seconds


def test_a_file_that_can_not_be_written_is_an_error(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert two_ranks.run(write_nowhere, tmp_path / "file" / "trace.json") == ["FileExistsError", "done"]


def write_nowhere(context: RankContext, path: Path) -> str:
    ddp = wrap("process_group")
    try:
        with ddp.timeline(path):
            step(ddp, context.rank)
    except OSError as error:
        return type(error).__name__
    return "done"


def test_file_is_json(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(record, "process_group", tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in content["traceEvents"]} == {"M", "X", "i"}
