"""A small GPT over bytes: pre-norm transformer blocks, learned positions, input and output embeddings tied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """The default has 1.3 million parameters."""

    context: int = 128
    width: int = 160
    heads: int = 5
    layers: int = 4


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network four times as wide, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention_in = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.apply(self._initialise)
        for block in blocks:  # keeps the variance of the residual stream at one whatever the depth
            for layer in (block.attention_out, block.feed_forward[-1]):
                nn.init.normal_(layer.get_parameter("weight"), std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor, targets: Tensor | None = None) -> Tensor:
        """(batch, length) bytes to (batch, length, 256) logits; with `targets`, to the mean cross-entropy in nats a byte."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.bytes.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` and `count` bytes drawn from the model, as text."""
    device = model.bytes.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    model.eval()
    for _ in range(count):
        logits = model(text[:, -model.config.context :])[:, -1] / temperature
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    model.train()
    return bytes(text[0].tolist()).decode(errors="replace")
