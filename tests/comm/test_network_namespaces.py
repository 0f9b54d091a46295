"""Two "hosts" on one machine: network namespaces, joined by a virtual cable. "auto" finds out which ranks share one, and what to use."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

RANK_SECONDS = 200


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, each of which reaches the other through its interface `cable`."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    names = (f"ddpcomm-{os.getpid()}-a", f"ddpcomm-{os.getpid()}-b")
    with contextlib.ExitStack() as stack:
        for name in names:
            if not _ip("netns", "add", name):
                pytest.skip("this user may not make network namespaces")
            stack.callback(_ip, "netns", "delete", name)
        if not _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]):
            pytest.skip("this machine has no virtual Ethernet")
        for number, name in enumerate(names):
            assert _ip("-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", "cable")
            assert _ip("-n", name, "link", "set", "cable", "up")
            assert _ip("-n", name, "link", "set", "lo", "up")
        yield names


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, timeout=30, check=False).returncode == 0


def run_ranks(placement: list[str], directory: Path) -> list[dict[str, object]]:
    """Runs a rank in each of the namespaces given; returns what they report."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable"}
    ranks = []
    for rank, host in enumerate(placement):
        arguments = [str(directory / "store"), str(rank), str(len(placement)), str(directory / f"result-{rank}")]
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "tests.comm.namespace_rank", *arguments]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        output = [rank.communicate(timeout=RANK_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(output)
    return [json.loads((directory / f"result-{rank}").read_text()) for rank in range(len(placement))]


@pytest.mark.parametrize(
    ("placement", "transport", "found"),
    [
        ("aabb", "hierarchical", [[0, 1], [2, 3]]),
        ("aba", "hierarchical", [[0, 2], [1]]),
        ("ab", "process_group", None),
        ("bb", "shared_memory", None),
    ],
)
def test_auto(hosts: tuple[str, str], tmp_path: Path, placement: str, transport: str, found: object) -> None:
    ranks = len(placement)
    total = ranks * (ranks + 1) / 2
    for report in run_ranks([hosts["ab".index(letter)] for letter in placement], tmp_path):
        assert report == {"transport": transport, "hosts": found, "sums": [[total, total]] * 6}
