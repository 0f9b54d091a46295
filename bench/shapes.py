"""Lists of tensors that kernels are measured on: the gradients of well-known models, and two extremes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ddpcomm.workloads import WORKLOADS

Shapes = list[tuple[int, ...]]


def llama7b_block() -> Shapes:
    """One block of Llama 7B: 9 tensors, 202 M elements."""
    return [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008), (4096,), (4096,)]


SHAPES: dict[str, Callable[[], Shapes]] = {
    "small400": lambda: [(16, 16)] * 400,
    "tiny10000": lambda: [(4,)] * 10_000,
    "resnet50": lambda: WORKLOADS["resnet50"]().shapes,  # 161 tensors, 25.6 M elements
    "bert_large": lambda: WORKLOADS["bert_large"]().shapes,  # 391 tensors, 335 M elements
    "gpt2_xl": lambda: WORKLOADS["gpt2_xl"]().shapes,  # 580 tensors, 1.56 G elements
    "llama7b_block": llama7b_block,
}


def numels(name: str, limit: int | None = None) -> list[int]:
    """Elements of each tensor of a list. limit: only the first tensors, of no more elements in all (but at least one tensor)."""
    sizes = [prod(shape) for shape in SHAPES[name]()]
    if limit is None:
        return sizes
    taken: list[int] = []
    for size in sizes:
        if taken and sum(taken) + size > limit:
            break
        taken.append(size)
    return taken
