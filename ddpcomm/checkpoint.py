"""Files that are whole or not there: written beside their place, flushed to the disk, and renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any

import torch

from ddpcomm.argument_checks import check_path


def save_checkpoint(state: Any, path: str | PathLike[str]) -> None:
    """Writes `state` with `torch.save`, so that `path` holds the former file or the whole new one, whatever happens meanwhile. Local:
    one rank's file serves all.

    Args:
        state: what `torch.save` takes, such as a dictionary of `state_dict()`s. Save `ddp.module.state_dict()` for keys without `module.`.
        path: the file. Directories that are missing are made.

    Raises:
        ConfigurationTypeError: `path` is no path.
        OSError: it can't be written; what was there before still is.
    """
    path = check_path("save_checkpoint: path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(state, file)


def write_text(path: str | PathLike[str], text: str) -> None:
    """The same for a text, in UTF-8.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends well, and vanishes when it doesn't.

    It is written in the same directory, under a name that begins with that of `path` and ends in ".tmp": a killed process may leave one.
    What is no regular file, such as /dev/null or a pipe, is written to as it is, and stays what it is.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(target, "wb") as device:
            yield device
        return
    name = target.parent / f"{target.name}.{secrets.token_hex(8)}.tmp"
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _flush_directory(target.parent)


def _flush_directory(directory: Path) -> None:
    """So that the new name outlives a loss of power, too."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
