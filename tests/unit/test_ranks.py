"""The tests' own foundation: `RankPool` reports every kind of failure in time and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.leftovers import SHARED_MEMORY, Leftovers
from tests.ranks import RankContext, RankFailure, RankPool

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def describe(context: RankContext, word: str) -> tuple[int, int, int, str]:
    tensor = torch.tensor([context.rank + 1.0])
    dist.all_reduce(tensor, group=context.process_group)
    return context.rank, context.world_size, int(tensor), word


def send_tensor(context: RankContext, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + context.rank


def threads(context: RankContext) -> int:
    return torch.get_num_threads()


def set_variable(context: RankContext) -> str | None:
    before = os.environ.get("RANKS_TEST")
    os.environ["RANKS_TEST"] = "set"
    return before


def fail_on(context: RankContext, rank: int) -> str:
    if context.rank == rank:
        raise ValueError(f"rank {rank} can't")
    return "fine"


def fail_everywhere(context: RankContext) -> None:
    raise ValueError(f"no luck on rank {context.rank}")


def die_on(context: RankContext, rank: int, with_child: bool) -> str:
    if context.rank == rank:
        if with_child:  # the child inherits the pipes and so keeps them open
            get_context("fork").Process(target=time.sleep, args=(600,)).start()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def exit_on(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        sys.exit(3)


def hang_on(context: RankContext, rank: int) -> int:
    if context.rank == rank:
        time.sleep(600)
    return context.rank


def hang_in_collective(context: RankContext) -> None:
    if context.rank == 0:
        dist.all_reduce(torch.ones(1))


def unpicklable(context: RankContext) -> Callable[[], None]:
    return lambda: None


def early_and_late(context: RankContext) -> float:
    """Rank 0 returns long before rank 1 has finished with the group."""
    tensors = [torch.ones(100_000) for _ in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if context.rank == 1:
        time.sleep(0.5)
    for work in works:
        assert work is not None
        work.wait()
    return float(tensors[-1][0])


def test_results_come_by_rank(pool: RankPool) -> None:
    assert pool.run(describe, "word") == [(0, 2, 3, "word"), (1, 2, 3, "word")]


def test_processes_and_not_groups_are_reused(pool: RankPool) -> None:
    pool.run(describe, "first")
    before = pool.process_ids
    assert [result[2] for result in pool.run(describe, "second")] == [3, 3]
    assert pool.process_ids == before
    assert len(before) == 2


def test_tensors_travel_both_ways(pool: RankPool) -> None:
    results = pool.run(send_tensor, torch.arange(3.0))
    assert torch.equal(results[1], torch.tensor([1.0, 2.0, 3.0]))


def test_each_rank_has_one_thread(pool: RankPool) -> None:
    assert pool.run(threads) == [1, 1]


def test_environment_is_restored(pool: RankPool) -> None:
    pool.run(set_variable)
    assert pool.run(set_variable) == [None, None]


def test_group_lives_until_the_slowest_rank_is_done(pool: RankPool) -> None:
    assert pool.run(early_and_late) == [2.0, 2.0]


def test_an_exception_on_one_rank(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="ValueError: rank 1 can't") as caught:
        pool.run(fail_on, 1)
    assert set(caught.value.tracebacks) == {1}
    assert caught.value.results == {0: "fine"}
    assert "in fail_on" in caught.value.tracebacks[1]


def test_exceptions_on_all_ranks_are_all_reported(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(fail_everywhere)
    assert "no luck on rank 0" in str(caught.value)
    assert "no luck on rank 1" in str(caught.value)


@pytest.mark.parametrize("with_child", [False, True])
def test_a_killed_rank_is_noticed_at_once(pool: RankPool, with_child: bool) -> None:
    pool.run(describe, "warm")
    started = time.monotonic()
    with pytest.raises(RankFailure, match="rank 0: died with exit code -9") as caught:
        pool.run(die_on, 0, with_child)
    assert time.monotonic() - started < 30, "the pool waited for its time limit instead"
    assert caught.value.results == {1: "alive"}


def test_sys_exit_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="SystemExit: 3"):
        pool.run(exit_on, 1)


def test_a_hanging_rank_ends_at_the_limit_and_shows_where(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="in hang_on") as caught:
        pool.run(hang_on, 1, timeout=timedelta(seconds=1))
    assert "no answer in time" in caught.value.tracebacks[1]
    assert caught.value.results == {0: 0}


def test_a_hanging_collective_ends_at_the_groups_limit(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="in hang_in_collective") as caught:
        pool.run(hang_in_collective, group_timeout=timedelta(seconds=1))
    assert set(caught.value.tracebacks) == {0}


def test_what_can_not_be_pickled_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="pickle"):
        pool.run(unpicklable)
    with pytest.raises(Exception, match="pickle"):
        pool.run(describe, lambda: None)


def test_processes_are_replaced_after_a_failure(pool: RankPool) -> None:
    pool.run(describe, "warm")
    before = pool.process_ids
    with pytest.raises(RankFailure):
        pool.run(fail_on, 0)
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert pool.run(describe, "again")[0] == (0, 2, 3, "again")


def test_a_rank_that_dies_between_runs_is_replaced(pool: RankPool) -> None:
    pool.run(describe, "warm")
    os.kill(pool.process_ids[1], signal.SIGKILL)
    os.waitid(os.P_PID, pool.process_ids[1], os.WEXITED | os.WNOWAIT)  # until it is dead, but leaves the news to the pool
    assert pool.run(describe, "again")[1] == (1, 2, 3, "again")


def test_close_ends_all_and_is_idempotent() -> None:
    pool = RankPool(3)
    pool.run(describe, "warm")
    ids = pool.process_ids
    pool.close()
    pool.close()
    assert len(ids) == 3
    assert not any(psutil.pid_exists(pid) for pid in ids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(describe, "late")


ABANDONED = """
import sys, time
from tests.ranks import RankPool
from tests.unit.test_ranks import hang_on, describe
if __name__ == "__main__":
    pool = RankPool(2)
    pool.run(describe, "warm")
    print(*pool.process_ids, flush=True)
    if sys.argv[1] == "killed":
        pool.run(hang_on, 0)
"""


@pytest.mark.parametrize("ending", ["killed", "forgotten"])
def test_no_rank_outlives_the_parent(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "abandoned.py"
    script.write_text(ABANDONED)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, script, ending], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        if ending == "killed":
            parent.kill()
        parent.wait(60)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 2
    assert not alive


def test_leftovers_are_found() -> None:
    leftovers = Leftovers()
    path = SHARED_MEMORY / f"ranks-test-{os.getpid()}"
    path.touch()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            found = "\n".join(leftovers.find(patience_seconds=0))
            assert str(path) in found
            assert f"process {process.pid}" in found
        finally:
            process.kill()
            path.unlink()
    assert f"process {process.pid}" not in "\n".join(leftovers.find(patience_seconds=0))


MAPS_A_FILE = """
import mmap, pathlib, subprocess, sys, time
if sys.argv[1] == "parent":
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    orphan = subprocess.Popen([sys.executable, __file__, "child", sys.argv[2]], start_new_session=True, **silent)
    print(orphan.pid)
else:
    with open(sys.argv[2], "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        mapping = mmap.mmap(file.fileno(), 4096)
    time.sleep(600)
"""


def test_what_other_sessions_map_is_theirs(tmp_path: Path) -> None:
    script = tmp_path / "maps_a_file.py"
    script.write_text(MAPS_A_FILE)
    leftovers = Leftovers()
    path = SHARED_MEMORY / f"ranks-test-elsewhere-{os.getpid()}"
    parent = subprocess.run([sys.executable, script, "parent", path], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    orphan = psutil.Process(int(parent.stdout))  # no longer a child of this process
    try:
        while not path.exists() or path.stat().st_size == 0:
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while (found := leftovers.find(patience_seconds=0)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert str(path) not in "\n".join(found)
    finally:
        orphan.kill()
        orphan.wait(20)
    assert str(path) in "\n".join(leftovers.find(patience_seconds=0))
    path.unlink()
