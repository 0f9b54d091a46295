"""Puts ddpcomm's class in the place of torch's, for scripts and frameworks that build DistributedDataParallel themselves."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any

from ddpcomm.comm.torch_ddp import TorchDDP
from ddpcomm.ddp import DistributedDataParallel


class Installation:
    """What `install()` returns: leaving it as a context manager undoes what that call did, and nothing else."""

    def __init__(self, *, made_here: bool) -> None:
        self._made_here = made_here

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._made_here:
            uninstall()


def install() -> Installation:
    """From now on `torch.nn.parallel.DistributedDataParallel` is ddpcomm's. Local; idempotent; on all ranks alike.

    As a call it lasts until `uninstall()`; in `with ddpcomm.install():` until the end of the block. Every module of torch that holds
    torch's class under some name is served, also those that torch imports later. So is every framework that is imported afterwards, or that
    looks the class up in `torch.nn.parallel` when it needs it.

    Out of reach: modules outside torch that were imported before and hold the class itself (`from torch.nn.parallel import
    DistributedDataParallel`), about which it warns; classes derived from torch's; models that are wrapped already.
    """
    if vars(sys.modules[TorchDDP.__module__])[TorchDDP.__name__] is DistributedDataParallel:
        return Installation(made_here=False)
    _exchange(TorchDDP, DistributedDataParallel)
    missed = sorted({module.__name__ for module in _modules(torch=False) if any(value is TorchDDP for value in _values(module))})
    if missed:
        warnings.warn(
            f"these modules were imported before ddpcomm.install() and go on with torch's DistributedDataParallel: {', '.join(missed)}. "
            "Call ddpcomm.install() before they are imported, if they wrap models with it",
            stacklevel=2,
        )
    return Installation(made_here=True)


def uninstall() -> None:
    """Gives torch its own class back, wherever in torch it was exchanged. Local; idempotent.

    Models that are wrapped go on with ddpcomm, and so do modules outside torch that were imported in between.
    """
    _exchange(DistributedDataParallel, TorchDDP)


def _exchange(former: type[Any], new: type[Any]) -> None:
    for module in _modules(torch=True):
        names = vars(module)
        for name in [name for name, value in names.copy().items() if value is former]:
            names[name] = new


def _modules(*, torch: bool) -> Iterator[ModuleType]:
    """The imported modules of torch, or all the others but ddpcomm's."""
    for name, module in sys.modules.copy().items():
        root = name.partition(".")[0]
        if isinstance(module, ModuleType) and root != "ddpcomm" and (root == "torch") is torch:
            yield module


def _values(module: ModuleType) -> list[Any]:
    return list(vars(module).copy().values())
