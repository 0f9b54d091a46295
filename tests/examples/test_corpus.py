"""The example's text: deduplicated, split by file, the same on every rank and in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.corpus import Corpus, Windows, load_corpus
from examples.training import Settings, batches


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_it_is_large_enough_and_split_about_ten_to_one(corpus: Corpus) -> None:
    assert len(corpus.training) > 5_000_000
    assert 0.03 < len(corpus.validation) / len(corpus.training) < 0.3


def test_no_text_is_in_both_splits_or_twice_in_one(corpus: Corpus) -> None:
    contents = [path.read_bytes() for path in corpus.training_files + corpus.validation_files]
    assert len(contents) == len(set(contents))
    assert sum(map(len, contents)) + len(contents) - 2 == len(corpus.training) + len(corpus.validation)


def test_neither_order_nor_place_of_the_files_matters(tmp_path: Path) -> None:
    texts = [f"text = {number}\n" * 3 for number in range(100)]
    orders = {"forward": texts, "backward": texts[::-1]}
    loaded = []
    for name, order in orders.items():
        (tmp_path / name).mkdir()
        for number, text in enumerate(order):
            (tmp_path / name / f"{number}.py").write_text(text)
        loaded.append(load_corpus(sorted((tmp_path / name).iterdir())))
    assert torch.equal(loaded[0].training, loaded[1].training)
    assert torch.equal(loaded[0].validation, loaded[1].validation)
    assert min(len(loaded[0].training), len(loaded[0].validation)) > 0


def test_duplicates_and_empty_files_are_dropped(tmp_path: Path) -> None:
    for number, text in enumerate(["one\n", "one\n", "\n", ""]):
        (tmp_path / f"{number}.py").write_text(text)
    corpus = load_corpus(sorted(tmp_path.iterdir()))
    assert len(corpus.training_files + corpus.validation_files) == 1


def test_windows_cover_the_text_and_overlap_by_one_byte() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = Windows(text, context=9)
    assert len(windows) == 11
    assert torch.equal(torch.cat([windows[index][:-1] for index in range(len(windows))]), text[:99].long())
    assert all(torch.equal(windows[index][1:], windows[index][:-1] + 1) for index in range(len(windows)))


def first_bytes(world_size: int, rank: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The windows, told by their first byte, that a rank sees; one epoch has 24 windows."""
    monkeypatch.setattr("torch.distributed.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    source = batches(Windows(torch.arange(25, dtype=torch.uint8), context=1), Settings(batch_size=3))
    return [int(window[0]) for _ in range(steps) for window in next(source)]


def test_ranks_share_out_each_epoch_and_epochs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [first_bytes(2, rank, 8, monkeypatch) for rank in range(2)]
    first, second = ([window for rank in seen for window in rank[epoch * 12 : epoch * 12 + 12]] for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first_bytes(2, 1, 8, monkeypatch) == seen[1]


def test_a_corpus_of_less_than_a_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with pytest.raises(ValueError, match="too small"):
        next(batches(Windows(torch.zeros(10, dtype=torch.uint8), context=4), Settings(batch_size=3)))
