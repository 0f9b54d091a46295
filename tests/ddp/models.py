"""Small models for the tests of DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Fork(nn.Module):
    """A trunk and two arms; the caller says which arms take part."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: Tensor, arms: str = "left right") -> Tensor:
        hidden = self.trunk(x).relu()
        return sum(getattr(self, arm)(hidden).pow(2).sum() for arm in arms.split())  # type: ignore[no-any-return]


def both_arms(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, "left right")


def left_arm(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, "left")


def right_arm(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, "right")


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).sum()


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


def convolutions() -> nn.Module:
    """Convolutions with batch norm, for images of 2 x 6 x 6."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


class Transformer(nn.Module):
    """A language model over 11 tokens, its output tied to its embedding. Takes token numbers, shape [batch, at most 6]."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.places = nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.output(self.norm(self.body(self.tokens(tokens) + self.places(places))))  # type: ignore[no-any-return]


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class MixedTypes(nn.Module):
    """Layers of four dtypes side by side."""

    def __init__(self) -> None:
        super().__init__()
        types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        self.layers = nn.ModuleList([nn.Linear(2, 1, dtype=dtype) for dtype in types])

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x.to(layer.weight.dtype)).double().pow(2).sum() for layer in self.layers)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight used by two layers, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(self.first(x).relu())))  # type: ignore[no-any-return]


def loss_itself(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)
