"""Which streams the flattening stream waits for. The classes are torch's own; what they would ask of CUDA is written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from ddpcomm import reducer
from ddpcomm.comm.factory import create_communicator
from ddpcomm.config import ReducerOptions, bucket_caps
from ddpcomm.errors import ConfigurationError
from ddpcomm.streams import refuse_capture, wait_for_producers

DEVICE = torch.device("cuda", 1)


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits_for: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other.cuda_stream)


class Gradient:
    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream.cuda_stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The current stream. As in torch, ExternalStream(0) is one of the pool's, and get_stream_from_external(0) the default stream:
    https://github.com/pytorch/pytorch/issues/182960."""
    stream = Stream(7)

    def external(number: int, device: torch.device) -> Stream:
        assert device == DEVICE
        return Stream(number)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: external(number or 1000, device))
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", external)
    return stream


def wait(streams: list[int], gradients: list[Gradient | None]) -> None:
    tensors: list[Tensor | None] = gradients  # type: ignore[assignment]
    wait_for_producers(streams, tensors, DEVICE)


def test_the_default_stream_is_waited_for_as_any_other(current: Stream) -> None:
    gradient = Gradient()
    wait([0, 7, 5], [gradient, None])
    assert current.waits_for == [0, 5]
    assert gradient.recorded == [7]


def test_what_was_produced_on_the_current_stream_needs_no_wait(current: Stream) -> None:
    gradient = Gradient()
    wait([7], [gradient])
    assert current.waits_for == []
    assert gradient.recorded == []


def test_a_captured_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda", 0)]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == DEVICE)
    with pytest.raises(ConfigurationError, match="captured into a CUDA graph"):
        refuse_capture(DEVICE)
    refuse_capture(torch.device("cuda", 0))
    refuse_capture(torch.device("cpu"))


def test_every_backward_that_synchronises_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(device: torch.device) -> None:
        asked.append(device)
        raise ConfigurationError("captured")

    monkeypatch.setattr(reducer, "refuse_capture", refuse)
    model = nn.Linear(2, 1)
    communicator = create_communicator(None, "cpu", "fake", world_size=2)
    averaging = reducer.Reducer(model, communicator, ReducerOptions(bucket_caps(None, None)))
    with pytest.raises(ConfigurationError, match="captured"):
        model(torch.ones(1, 2)).sum().backward()
    assert asked == [torch.device("cpu")]
    averaging.close()
