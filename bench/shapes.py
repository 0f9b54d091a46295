"""Lists of tensors that kernels are measured on: the gradients of well-known models, and two extremes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """torchvision's resnet50: 161 tensors, 25.6 M elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def bert_large() -> Shapes:
    """BERT-large: 391 tensors, 335 M elements."""
    hidden, inner = 1024, 4096
    shapes: Shapes = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    for _ in range(24):
        shapes += [(hidden, hidden), (hidden,)] * 4 + [(hidden,), (hidden,)]
        shapes += [(inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,)]
    return [*shapes, (hidden, hidden), (hidden,)]


def gpt2_xl() -> Shapes:
    """GPT-2 XL: 580 tensors, 1.56 G elements."""
    hidden = 1600
    shapes: Shapes = [(50257, hidden), (1024, hidden)]
    for _ in range(48):
        shapes += [(hidden,), (hidden,), (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
        shapes += [(hidden,), (hidden,), (hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]
    return [*shapes, (hidden,), (hidden,)]


def llama7b_block() -> Shapes:
    """One block of Llama 7B: 9 tensors, 202 M elements."""
    return [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008), (4096,), (4096,)]


SHAPES: dict[str, Callable[[], Shapes]] = {
    "small400": lambda: [(16, 16)] * 400,
    "tiny10000": lambda: [(4,)] * 10_000,
    "resnet50": resnet50,
    "bert_large": bert_large,
    "gpt2_xl": gpt2_xl,
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
