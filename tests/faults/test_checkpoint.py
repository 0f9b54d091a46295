"""A file that is saved is whole: the new one or the one before, whatever happens in between."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ddpcomm
from ddpcomm.checkpoint import replacing, write_text

pytestmark = pytest.mark.timeout(90)


def test_saves_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    for value in (1, 2):
        ddpcomm.save_checkpoint({"weight": torch.full((3,), value)}, path)
        assert torch.load(path)["weight"].tolist() == [value] * 3
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "told")
        assert os.read(reader, 10) == b"told"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "told")
    assert os.listdir(tmp_path) == ["pipe"]


def test_modes_and_links_are_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    former = os.umask(0o027)
    try:
        write_text(path, "one")
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.symlink_to(path)
    write_text(link, "two")
    assert link.is_symlink()
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("two", 0o604)


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    ddpcomm.save_checkpoint({"step": 1}, path)
    with pytest.raises(Exception, match=r"pickle|local"):
        ddpcomm.save_checkpoint({"step": torch.ones(1000), "broken": lambda: None}, path)
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", "text"])  # type: ignore[list-item]
    assert torch.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "nowhere" / "plan.json", "")
    ddpcomm.save_checkpoint({"step": 2}, tmp_path / "new" / "place" / "checkpoint.pt")
    assert torch.load(tmp_path / "new" / "place" / "checkpoint.pt") == {"step": 2}


KILLED = """
import os, signal, sys
from ddpcomm.checkpoint import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half of the new one")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    ddpcomm.save_checkpoint({"step": 1}, path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=80)
    assert done.returncode == -signal.SIGKILL
    assert torch.load(path) == {"step": 1}
    (left,) = [name for name in os.listdir(tmp_path) if name != "checkpoint.pt"]
    assert left.startswith("checkpoint.pt.")
    assert left.endswith(".tmp")
    ddpcomm.save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 2}
