"""What autograd can't see being written is told to it: a backward that needs what was there before is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddpcomm import create_communicator, ops


def flatten(tensor: Tensor) -> None:
    ops.flatten([torch.ones(256)], tensor)


def unflatten(tensor: Tensor) -> None:
    ops.unflatten(torch.ones(256), [tensor])


def dequantise(tensor: Tensor) -> None:
    ops.dequantise(torch.zeros(256, dtype=torch.uint8), torch.ones(1), [tensor])


def residual(tensor: Tensor) -> None:
    ops.quantise([torch.ones(256)], torch.zeros(256, dtype=torch.uint8), torch.ones(1), residual=tensor)


def all_reduce(tensor: Tensor) -> None:
    create_communicator(transport="fake").all_reduce(tensor).wait()


def broadcast(tensor: Tensor) -> None:
    create_communicator(transport="fake").broadcast(tensor).wait()


def all_gather(tensor: Tensor) -> None:
    create_communicator(transport="fake").all_gather(tensor, torch.ones(256)).wait()


def reduce_scatter(tensor: Tensor) -> None:
    create_communicator(transport="fake").reduce_scatter(tensor, torch.ones(256)).wait()


@pytest.mark.parametrize("write", [flatten, unflatten, dequantise, residual, all_reduce, broadcast, all_gather, reduce_scatter])
def test_a_backward_that_needs_the_old_values_is_an_error(write: Callable[[Tensor], None]) -> None:
    written, x = torch.zeros(256), torch.ones(256, requires_grad=True)
    product = written * x
    write(written)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_of_a_leaf_as_well() -> None:
    leaf = torch.zeros(256, requires_grad=True)
    square = leaf.pow(2)
    all_reduce(leaf)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    unflatten(leaf)
    assert leaf.tolist() == [1.0] * 256


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(256)
        unflatten(tensor)
        all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 256


@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_tensors_without_memory_are_refused(implementation: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match="no memory of its own"):
        ops.flatten([wrapped], torch.zeros(4), implementation=implementation)
    with pytest.raises(ValueError, match="no memory of its own"):
        ops.unflatten(torch.ones(4), [wrapped], implementation=implementation)


def test_targets_that_overlap_are_refused() -> None:
    memory = torch.zeros(6)
    with pytest.raises(ValueError, match="tensors 0 and 1 overlap"):
        ops.unflatten(torch.ones(8), [memory[:4], memory[2:]])
    assert not memory.any()
    ops.unflatten(torch.ones(6), [memory[3:], memory[:3]])
    assert memory.all()
