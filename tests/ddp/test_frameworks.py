"""Frameworks that build DistributedDataParallel themselves, with ddpcomm in its place: the weights are those of training by hand.

The frameworks are no dependencies of this project; what isn't there is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

import ddpcomm
from tests.ranks import RankContext, RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4
RATE = 0.05


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).pow(2).mean()}


def samples() -> list[Tensor]:
    """For each step two of each rank; which is whose, depends on how a framework shares them out."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, generator=generator) for _ in range(4 * STEPS)]


def by_hand(batch: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """The parameters after training with averaged gradients; `batch(step, rank)`."""
    replicas = [Model(), Model()]
    for step in range(STEPS):
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            replica.load_state_dict({**replica.state_dict(), **dict(replicas[0].named_buffers())})
            replica(batch(step, rank))["loss"].backward()
        for pair in zip(*(replica.parameters() for replica in replicas), strict=True):
            mean = pair[0].grad / 2 + pair[1].grad / 2
            for parameter in pair:
                with torch.no_grad():
                    parameter.sub_(RATE * mean)
    return {name: p.detach() for name, p in replicas[0].named_parameters()}


def whole_batches(step: int, rank: int) -> Tensor:
    """Whole batches go round: rank 0 gets the first two samples, rank 1 the next two."""
    start = 4 * step + 2 * rank
    return torch.stack(samples()[start : start + 2])


def single_samples(step: int, rank: int) -> Tensor:
    """torch's DistributedSampler: samples go round."""
    return torch.stack(samples()[rank::2][2 * step : 2 * step + 2])


def check(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {name: p.detach() for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def pretend_torchrun(rank: RankContext) -> None:
    """What torchrun tells its ranks; the process group is there already, and every framework uses it."""
    os.environ.update(RANK=str(rank.rank), LOCAL_RANK=str(rank.rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test", ACCELERATE_USE_CPU="true")


def train_accelerate(rank: RankContext) -> str:
    pretend_torchrun(rank)
    with ddpcomm.install():
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = Model()
        loader = DataLoader(samples(), batch_size=2)  # type: ignore[arg-type]  # a list will do
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            if step % 2:
                accelerator.backward(wrapped(batch)["loss"])
            else:  # synchronised, though its forward was told not to be
                with accelerator.no_sync(wrapped):
                    loss = wrapped(batch)["loss"]
                with accelerator.trigger_sync_in_backward(wrapped):
                    accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1e6)
            optimizer.step()
        check(accelerator.unwrap_model(wrapped), by_hand(whole_batches))
    return type(wrapped).__module__


def train_transformers(rank: RankContext, directory: Path) -> str:
    pretend_torchrun(rank)
    with ddpcomm.install():
        from transformers import Trainer, TrainingArguments

        class InOrder(Trainer):  # type: ignore[misc]
            def _get_train_sampler(self, *_: Any) -> SequentialSampler:
                return SequentialSampler(samples())

        model = Model()
        settings = {"max_grad_norm": 0.0, "num_train_epochs": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"}
        trainer = InOrder(
            model=model,
            args=TrainingArguments(
                str(directory / str(rank.rank)), use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **settings
            ),
            train_dataset=[{"x": sample} for sample in samples()],
            optimizers=(optimizer := optimizer_of(model), torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        )
        trainer.train()
        check(model, by_hand(whole_batches))
    return type(trainer.model_wrapped).__module__


def train_lightning(rank: RankContext, package: str, directory: Path, manual: bool) -> str:
    pretend_torchrun(rank)
    with ddpcomm.install():
        lightning = __import__(f"{package}.pytorch", fromlist=["*"]) if package == "lightning" else __import__(package)

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.model = Model()
                self.automatic_optimization = not manual

            def training_step(self, batch: Tensor, _: int) -> Tensor:
                loss = self.model(batch)["loss"]
                if manual:
                    self.optimizers().zero_grad()
                    self.manual_backward(loss)
                    self.optimizers().step()
                return loss  # type: ignore[no-any-return]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer_of(self)

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        strategy = lightning.strategies.DDPStrategy(static_graph=manual)
        where = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "default_root_dir": str(directory)}
        trainer = lightning.Trainer(max_epochs=1, use_distributed_sampler=False, **where, **quiet)
        module = Module()
        kind: list[str] = []
        module.on_train_start = lambda: kind.append(type(trainer.strategy.model).__module__)
        trainer.fit(module, sharded_loader())
        check(module.model, by_hand(single_samples))
    return kind[0]


def train_fabric(rank: RankContext) -> str:
    pretend_torchrun(rank)
    with ddpcomm.install():
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        model = Model()
        wrapped, optimizer = fabric.setup(model, optimizer_of(model))
        loader = fabric.setup_dataloaders(sharded_loader(), use_distributed_sampler=False)
        for batch in loader:
            optimizer.zero_grad()
            with fabric.no_backward_sync(wrapped):
                fabric.backward(wrapped(batch)["loss"] / 2)
            fabric.backward(wrapped(batch)["loss"] / 2)
            optimizer.step()
        check(model, by_hand(single_samples))
    return type(wrapped._forward_module).__module__


def sharded_loader() -> DataLoader[Tensor]:
    data: Any = samples()  # a list will do
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))


@pytest.fixture(scope="module")
def fresh() -> Iterator[Callable[[], RankPool]]:
    """Ranks of their own for each test: frameworks keep state in the process, and take the class as they are imported."""
    pools: list[RankPool] = []

    def make() -> RankPool:
        pools.append(RankPool(2, timeout=timedelta(seconds=110)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@needs("accelerate")
def test_accelerate(fresh: Callable[[], RankPool]) -> None:
    assert fresh().run(train_accelerate) == ["ddpcomm.ddp"] * 2


@needs("transformers")
@needs("accelerate")
def test_transformers(fresh: Callable[[], RankPool], tmp_path: Path) -> None:
    assert fresh().run(train_transformers, tmp_path) == ["ddpcomm.ddp"] * 2


@pytest.mark.parametrize("manual", [False, True], ids=["automatic optimization", "manual optimization"])
@pytest.mark.parametrize("package", [pytest.param(name, marks=needs(name)) for name in ("lightning", "pytorch_lightning")])
def test_lightning(fresh: Callable[[], RankPool], tmp_path: Path, package: str, manual: bool) -> None:
    assert fresh().run(train_lightning, package, tmp_path, manual) == ["ddpcomm.ddp"] * 2


@needs("lightning")
def test_fabric(fresh: Callable[[], RankPool]) -> None:
    assert fresh().run(train_fabric) == ["ddpcomm.ddp"] * 2
