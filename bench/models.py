"""The models whose steps are measured: each stresses another part of a gradient's way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from examples.model import Block, GPTConfig


@dataclass(frozen=True)
class Case:
    """A model and a batch small enough for the exchange to matter. `stresses` says what."""

    name: str
    stresses: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """A scalar whose gradients depend on the batch and reach every parameter."""
        output: Tensor = model(batch)
        return output.square().mean()


def small_tensors() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(200) for layer in (nn.Linear(32, 32), nn.ReLU())])


def perceptron(*widths: int) -> nn.Module:
    return nn.Sequential(*[layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())])


class Residual(nn.Module):
    """Two 3x3 convolutions with batch normalisation, added to a 1x1 convolution of their input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def convolutions() -> nn.Module:
    blocks = [Residual(16, 32, 2), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 128, 1), Residual(128, 128, 1)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def transformer() -> nn.Module:
    return nn.Sequential(*[Block(GPTConfig(context=64, width=384, heads=6)) for _ in range(4)])


CASES = {
    case.name: case
    for case in (
        Case("tensors400", "cost a parameter", small_tensors, lambda: torch.randn(16, 32)),
        Case("mlp8m", "few tensors of megabytes", lambda: perceptron(1024, 2048, 2048, 1024), lambda: torch.randn(32, 1024)),
        Case("convnet", "small tensors, much computation, buffers", convolutions, lambda: torch.randn(8, 3, 32, 32)),
        Case("transformer7m", "the usual mixture", transformer, lambda: torch.randn(2, 64, 384)),
        Case("mlp67m", "bandwidth", lambda: perceptron(4096, 4096, 4096, 4096, 4096), lambda: torch.randn(8, 4096)),
    )
}
