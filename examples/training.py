"""The training loop. It steps one replica of the model, or several in turn on the same batches, and compares their weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from examples.corpus import Corpus, Windows

BITS_PER_NAT = 1 / math.log(2)


@dataclass(frozen=True)
class Settings:
    """How to train. `batch_size` is that of each rank."""

    steps: int = 1000
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    validations: int = 8
    validation_windows: int = 256
    seed: int = 0


@dataclass
class History:
    """What a run showed: losses in bits a byte. `first_difference` is the first step after which two replicas' weights differed."""

    training: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    first_difference: int | None = None


class Replica:
    """One copy of the model behind a data-parallel wrapper, its optimizer, and the seconds that its steps took."""

    def __init__(self, name: str, wrapped: nn.Module, settings: Settings) -> None:
        self.name = name
        self.wrapped = wrapped
        self.optimizer = torch.optim.AdamW(wrapped.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, settings))
        self.step_seconds: list[float] = []

    def step(self, batch: Tensor) -> Tensor:
        """One step of training; returns this rank's loss in nats a byte."""
        synchronize(batch.device)
        started = time.perf_counter()
        loss: Tensor = self.wrapped(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.wrapped.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        synchronize(batch.device)
        self.step_seconds.append(time.perf_counter() - started)
        return loss.detach()


def learning_rate_factor(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))


def train(
    replicas: Sequence[Replica], corpus: Corpus, context: int, settings: Settings, device: torch.device, show: Callable[[str], None]
) -> History:
    """Trains all replicas, step by step in turn, on this rank's shard of the corpus. Collective.

    Which replica goes first alternates, so that neither always finds the caches warm.
    """
    history = History()
    validation_steps = {round(settings.steps * part / settings.validations) for part in range(settings.validations + 1)}
    source = batches(Windows(corpus.training, context), settings)
    with tqdm(total=settings.steps, disable=dist.get_rank() != 0, unit="step", dynamic_ncols=True) as bar:
        for step in range(settings.steps + 1):
            if step in validation_steps:
                history.validation[step] = validate(replicas[0].wrapped, Windows(corpus.validation, context), settings, device)
                show(f"step {step:5d}: validation {history.validation[step]:.3f} bits per byte")
            if step == settings.steps:
                break
            batch = next(source).to(device)
            losses = {replica.name: replica.step(batch) for replica in (replicas if step % 2 == 0 else replicas[::-1])}
            if history.first_difference is None and not all(same_weights(replicas[0], other) for other in replicas[1:]):
                history.first_difference = step
            history.training.append(losses[replicas[0].name].item() * BITS_PER_NAT)
            tokens_per_second = batch.shape[0] * context * dist.get_world_size() / replicas[0].step_seconds[-1]
            bar.set_postfix_str(f"loss {history.training[-1]:.3f} bits/byte, {tokens_per_second:,.0f} tokens/s", refresh=False)
            bar.update()
    history.first_difference = earliest(history.first_difference, settings.steps, device)
    return history


def batches(dataset: Dataset[Tensor], settings: Settings) -> Iterator[Tensor]:
    """This rank's batches, epoch after epoch, each epoch in an order of its own that all ranks agree on."""
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, shuffle=True, seed=settings.seed, drop_last=True)
    loader = DataLoader(dataset, settings.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise ValueError(f"the corpus is too small for batches of {settings.batch_size} windows on each rank")
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


@torch.no_grad()
def validate(model: nn.Module, dataset: Windows, settings: Settings, device: torch.device) -> float:
    """Mean loss, in bits a byte, over windows spread evenly over the validation files; each rank takes its share. Collective."""
    total = min(settings.validation_windows, len(dataset))
    chosen = [index * len(dataset) // total for index in range(dist.get_rank(), total, dist.get_world_size())]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for start in range(0, len(chosen), settings.batch_size):
        batch = torch.stack([dataset[index] for index in chosen[start : start + settings.batch_size]]).to(device)
        sums += torch.tensor([model(batch[:, :-1], batch[:, 1:]).item() * len(batch), len(batch)], dtype=torch.float64, device=device)
    model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]) * BITS_PER_NAT


def same_weights(one: Replica, other: Replica) -> bool:
    """Whether every parameter has the same bits, NaNs and signs of zeros included."""
    pairs = zip(one.wrapped.parameters(), other.wrapped.parameters(), strict=True)
    return all(torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8)) for a, b in pairs)


def earliest(step: int | None, steps: int, device: torch.device) -> int | None:
    """The earliest of all ranks' `step`. Collective."""
    first = torch.tensor(steps if step is None else step, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    return None if int(first) == steps else int(first)


def synchronize(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
