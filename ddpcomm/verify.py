"""At construction: do all ranks hold the same model and options? One small all-gather of a digest; details only when digests differ."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import nn

from ddpcomm.agreement import Signature, describe, describe_parameter, require_equal
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.exchange import all_gather_objects
from ddpcomm.errors import DDPCommError
from ddpcomm.named_tensors import named_buffers, named_parameters


def model_signatures(module: nn.Module, ignored: Collection[str], options: Mapping[str, object]) -> list[Signature]:
    """Everything that must be alike on all ranks, in order: parameters, buffers, constructor options."""
    found = [(f"option {name}", repr(value)) for name, value in options.items()]
    found += [
        (name, f"{describe_parameter(parameter)}, requires_grad={parameter.requires_grad}, on {parameter.device.type}")
        for name, parameter in named_parameters(module, ignored)
    ]
    found += [(f"buffer {name}", describe(buffer)) for name, buffer in named_buffers(module, ignored).items()]
    return found


def require_same_model(communicator: Communicator, signatures: list[Signature], failure: DDPCommError | None = None) -> None:
    """Raises on every rank if the ranks' signatures differ, or if some rank brings a failure. Collective.

    Args:
        signatures: this rank's.
        failure: an error that this rank has met already, so that the others don't wait for it.

    Raises:
        RankMismatchError: names what differs, with each side's values.
        DDPCommError: some rank's failure.
    """
    digest = hashlib.sha256(repr((signatures, str(failure))).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(communicator.device)
    everyone = torch.empty(communicator.world_size * mine.numel(), dtype=torch.uint8, device=communicator.device)
    communicator.all_gather(everyone, mine).wait()
    alike = bool((everyone.view(communicator.world_size, -1) == mine).all())
    if alike and failure is None:
        return
    told = all_gather_objects(communicator, (signatures, None if failure is None else (type(failure), str(failure))))
    failures = [(rank, *told_failure) for rank, (_, told_failure) in enumerate(told) if told_failure is not None]
    if failures:
        texts = {text for _, _, text in failures}
        alone = len(failures) < communicator.world_size
        raise failures[0][1](("; ".join(f"rank {rank}: {text}" for rank, _, text in failures)) if alone else "; ".join(sorted(texts)))
    require_equal("models or options", [theirs for theirs, _ in told])
