"""The streams that gradients are produced and flattened on. CUDA alone; on the CPU there is nothing to order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddpcomm.errors import ConfigurationError


def stream_reader(device: torch.device) -> Callable[[], int] | None:
    """Returns what tells the current stream of `device`, as a number; None where there are no streams. Called at every gradient: 0.1 us."""
    if device.type != "cuda":
        return None
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index or 0)


def wait_for_producers(streams: Sequence[int], gradients: Sequence[Tensor | None], device: torch.device) -> None:
    """Makes the current stream wait for what `streams` hold at present, and keeps the gradients' memory from being given to others before
    the current stream has read it.

    Args:
        streams: numbers from `stream_reader`, of the streams on which the gradients were produced.
        gradients: what is going to be read on the current stream.
        device: where all this is.
    """
    if device.type != "cuda":
        return
    current = torch.cuda.current_stream(device)
    others = [number for number in streams if number != current.cuda_stream]
    for number in others:  # ExternalStream would take 0, the default stream, for a request for a new one
        current.wait_stream(torch.cuda.get_stream_from_external(number, device))
    if others:
        for gradient in gradients:
            if gradient is not None:
                gradient.record_stream(current)


def refuse_capture(device: torch.device) -> None:
    """A graph would replay the all-reduces without what goes with them on the host: status words, time limits, addresses of gradients.

    Raises:
        ConfigurationError: the current stream of `device` is being captured into a CUDA graph.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ConfigurationError(
            "this backward is being captured into a CUDA graph, and one that synchronises can't be. Graph parts of the model before it is "
            "wrapped instead (torch.cuda.make_graphed_callables): their gradients are accumulated outside of the graphs"
        )
