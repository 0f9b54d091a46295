"""The thin layer over CUDA, as far as that goes without a GPU: what it asks of torch, and on which device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ddpcomm.comm.cuda_runtime import TorchCudaRuntime


def test_capture_is_asked_of_the_runtime_s_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda", 0)]

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == 1)
    assert TorchCudaRuntime(torch.device("cuda", 1)).is_capturing()
    assert not TorchCudaRuntime(torch.device("cuda", 0)).is_capturing()
