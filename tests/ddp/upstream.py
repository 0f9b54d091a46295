"""Runs DDP tests that PyTorch ships in its wheel, on the ranks of a `RankPool`, with ddpcomm's class in DDP's place."""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ddpcomm
from tests.ddp.pretend_gpus import gpus_are_cpu
from tests.ranks import RankContext

MODULE = "torch.testing._internal.distributed.distributed_test"
NEEDS = ("expecttest", "hypothesis", "psutil")


def run(context: RankContext, name: str, directory: Path) -> str | None:
    """Runs one test on this rank.

    Args:
        name: of the test.
        directory: empty at first, the same for all ranks: the tests meet there.

    Returns:
        The reason why the test skipped itself, or None: it passed.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(context.world_size), TEMP_DIR=str(directory))
    for subdirectory in ("barrier", "test_dir", "init_dir"):
        (directory / subdirectory).mkdir(exist_ok=True)
    test_class = _test_class()  # imported first: torch.compile takes stock of torch's functions as they really are
    with gpus_are_cpu(context.world_size), ddpcomm.install(), _devices_ignored():
        case = test_class(name)
        case.rank = context.rank
        case.file_name = str(directory / "store")
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return str(skip)
        except SystemExit as skip:  # how torch's decorators skip a test in a rank
            return f"exit code {skip.code}"
    return None


@contextmanager
def _devices_ignored() -> Iterator[None]:
    """`device_ids` name GPUs, which are the CPU here, where it must be None."""
    make = ddpcomm.DistributedDataParallel.__init__

    @functools.wraps(make)
    def make_on_cpu(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        make(self, module, None, None, *args, **kwargs)

    with mock.patch.object(ddpcomm.DistributedDataParallel, "__init__", make_on_cpu):
        yield


def _test_class() -> type[Any]:
    """The class that holds the tests. Its decorators ask for GPUs when they are imported."""
    import torch.testing._internal.common_distributed as common
    from torch.testing._internal import common_utils

    def keep(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    with mock.patch.multiple(
        common,
        skip_if_lt_x_gpu=keep,
        nccl_skip_if_lt_x_gpu=keep,
        require_n_gpus_for_nccl_backend=keep,
        skip_if_no_gpu=lambda function: function,
        init_multigpu_helper=lambda world_size, backend: {rank: [rank] for rank in range(world_size)},
    ):
        import torch.testing._internal.distributed.distributed_test as upstream

    common_utils.set_rng_seed()
    upstream.Barrier.barrier_id = 0

    class Test(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        pass

    return Test
