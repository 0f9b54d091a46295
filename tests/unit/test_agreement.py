"""What follows from the ranks' reports: the same on every rank, whatever the reports are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddpcomm import agreement as module
from ddpcomm.agreement import Agreement, Report, agree, describe, require_equal, signatures
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.fake import FakeCommunicator
from ddpcomm.errors import CommHookError, LostGradientError, RankMismatchError
from ddpcomm.parameters import ParameterSet

SAME = (("a", "shape"), ("b", "shape"))


@pytest.fixture
def communicator() -> Communicator:
    return FakeCommunicator(device=torch.device("cpu"))


def settled(communicator: Communicator, monkeypatch: pytest.MonkeyPatch, *reports: Report) -> Agreement:
    """What `agree` makes of reports that the ranks have exchanged."""
    monkeypatch.setattr(module, "all_gather_objects", lambda *_: list(reports))
    return agree(communicator, reports[0])


def test_agreement(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Report(SAME, late=("a",), ready_order=("b", "a"), fires={"a": 2, "b": 1}, sparse=("a",), newcomers=("b",))
    second = Report(SAME, late=("a", "b"), ready_order=("a", "b"), fires={"a": 1, "b": 3}, newcomers=("b",), in_buckets=("a",))
    found = settled(communicator, monkeypatch, first, second)
    assert found.late == {"a": (0, 1), "b": (1,)}
    assert found.ready_order == ("b", "a")  # rank 0's
    assert found.fires == {"a": 2, "b": 3}
    assert found.sparse == {"a"}
    assert found.newcomers == {"b"}
    assert found.unanimous
    assert found.in_buckets == {"a"}


def test_newcomers_on_one_rank(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settled(communicator, monkeypatch, Report(SAME, newcomers=("b",)), Report(SAME)).unanimous


def test_failures(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the type of the first, with everybody's text; before anything else is compared."""
    reports = [
        Report(()),
        Report(SAME, failure=(CommHookError, "hook")),
        Report(SAME, failure=(LostGradientError, "lost")),
    ]
    with pytest.raises(CommHookError, match="rank 1: hook; rank 2: lost"):
        settled(communicator, monkeypatch, *reports)


def test_different_parameters(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankMismatchError, match=r"rank 1.*b is only on rank 0"):
        settled(communicator, monkeypatch, Report(SAME), Report(SAME[:1]))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ((("a", "shape"),), "b is only on rank 0"),
        ((*SAME, ("c", "shape")), "c is only on rank 1"),
        ((("a", "other"), ("b", "shape")), "a is shape on rank 0, other on rank 1"),
        ((("b", "shape"), ("a", "shape")), "a on rank 0 stands where b stands on rank 1"),
    ],
)
def test_differences(other: tuple[tuple[str, str], ...], text: str) -> None:
    with pytest.raises(RankMismatchError, match=text):
        require_equal("things", [SAME, other])


def test_no_difference() -> None:
    require_equal("things", [SAME, SAME, SAME])


def test_long_lists_are_cut() -> None:
    many = [(f"p{index}", "shape") for index in range(25)]
    with pytest.raises(RankMismatchError, match="and 15 more"):
        require_equal("things", [many, []])


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), True),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64), False),
        (torch.zeros(1, 3), torch.zeros(3, 1).t(), True),
        (torch.zeros(4, 1, 3), torch.zeros(4, 3).unsqueeze(1), True),
    ],
)
def test_description(first: Tensor, second: Tensor, alike: bool) -> None:
    assert (describe(first) == describe(second)) == alike


def test_signatures_are_of_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False))
    assert [name for name, _ in signatures(ParameterSet(model))] == ["0.weight", "0.bias"]
