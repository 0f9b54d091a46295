"""A corpus that needs no download: the Python files of the running interpreter's standard library, as bytes.

Files are told apart by the hash of their content. It removes duplicates, and it decides to which split a file belongs, so that the split
depends neither on paths nor on the order in which a file system lists them, and no text is in both.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VALIDATION_SHARE = 10  # one file in this many is kept for validation
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """The two splits: each a tensor of bytes, and the files it was made of."""

    training: Tensor
    validation: Tensor
    training_files: tuple[Path, ...]
    validation_files: tuple[Path, ...]


def standard_library_files() -> list[Path]:
    """Every Python file of the standard library but for tests and what was installed on top."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts))


def load_corpus(files: Iterable[Path] | None = None) -> Corpus:
    """Reads, deduplicates and splits `files`, by default the standard library's."""
    contents: dict[str, tuple[Path, bytes]] = {}
    for path in standard_library_files() if files is None else files:
        content = path.read_bytes()
        if content.strip():
            contents.setdefault(hashlib.sha256(content).hexdigest(), (path, content))
    splits: tuple[list[tuple[Path, bytes]], list[tuple[Path, bytes]]] = ([], [])
    for digest, item in sorted(contents.items()):
        splits[int(digest, 16) % VALIDATION_SHARE == 0].append(item)
    training, validation = splits
    return Corpus(
        _join(content for _, content in training),
        _join(content for _, content in validation),
        tuple(path for path, _ in training),
        tuple(path for path, _ in validation),
    )


def _join(contents: Iterable[bytes]) -> Tensor:
    text = bytearray(b"\n".join(contents))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Windows of `context` + 1 bytes, one next to the other: the model reads the first `context` and predicts the last `context`."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()
