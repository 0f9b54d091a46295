"""Predicted and measured steps on this machine, over bucket sizes and numbers of ranks.

A prediction knows the step without exchange, when each gradient is ready in it, what all-reduces of several sizes cost by themselves and
how fast gradients are copied: nothing of the steps that it is held against. Everything is measured in the same rounds, for the machine's
speed changes from minute to minute. Ranks that make their own progress, on no more cores than ranks, stand still while a bucket is under
way: contention is 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcomm
from bench.report import Table
from bench.rows import Row, percentiles
from bench.subjects import twin
from ddpcomm import ops
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.factory import create_communicator
from ddpcomm.cost_model import MeasuredCost
from ddpcomm.layout import Caps, ParameterSize
from ddpcomm.simulate import Exchange, StepProfile, simulate
from tests.ranks import RankContext, RankPool

TRANSPORTS = ("process_group", "shared_memory")
CAPS_MIB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
SIZES_BYTES = tuple(1 << power for power in (10, 16, 18, 20, 21, 22, 23, 24, 25, 26))
WIDTHS = (*[256] * 9, *[512] * 13, *[1024] * 6)
BATCH = 64
WARM_UP_ROUNDS = 2
Samples = dict[str, list[float]]


def model() -> nn.Module:
    """Layers of a quarter of a MiB, of one and of four."""
    return nn.Sequential(*[layer for pair in pairwise(WIDTHS) for layer in (nn.Linear(*pair), nn.ReLU())])


def all_reduce(communicator: Communicator, buffer: Tensor) -> None:
    communicator.all_reduce(buffer).wait()


def measure(context: RankContext, transport: str, rounds: int) -> Samples:
    """Runs on each rank: seconds of everything that is measured, by what it is."""
    torch.manual_seed(0)
    original, batch = model(), torch.randn(BATCH, WIDTHS[0])
    plain = twin(original)
    samples: Samples = {}

    def note(name: str, run: Callable[[], object]) -> None:
        dist.barrier()
        began = time.perf_counter()
        run()
        samples.setdefault(name, []).append(time.perf_counter() - began)

    wrapped = {f"step {cap}": ddpcomm.DistributedDataParallel(twin(original), bucket_cap_mb=cap, transport=transport) for cap in CAPS_MIB}
    gradients = [torch.zeros_like(p) for p in plain.parameters()]
    with create_communicator(context.process_group, "cpu", transport, timedelta(seconds=60)) as communicator:
        buffers = {f"all-reduce {size}": communicator.empty(size // 4, torch.float32).zero_() for size in SIZES_BYTES}
        flat = communicator.empty(sum(p.numel() for p in gradients), torch.float32).zero_()
        tasks: dict[str, Callable[[], object]] = {"plain": lambda: step(plain, batch)}
        tasks["flatten"] = lambda: ops.flatten(gradients, flat, scale=0.5)
        tasks["unflatten"] = lambda: ops.unflatten(flat, gradients)
        for name, buffer in buffers.items():
            tasks[name] = partial(all_reduce, communicator, buffer)
        for name, subject in wrapped.items():
            tasks[name] = partial(step, subject, batch)
        names = list(tasks)
        for number in range(rounds + WARM_UP_ROUNDS):
            if number == WARM_UP_ROUNDS:
                samples.clear()
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                note(name, tasks[name])
            for name, seconds in ready_times(plain, batch).items():
                samples.setdefault(name, []).append(seconds)
        dist.barrier()
    for subject in wrapped.values():
        subject.close()
    return samples


def step(module: nn.Module, batch: Tensor) -> None:
    module(batch).square().mean().backward()
    module.zero_grad()


def ready_times(module: nn.Module, batch: Tensor) -> dict[str, float]:
    """One step without exchange: when each gradient came, since the start of backward, and how long backward took."""
    found: dict[str, float] = {}
    handles = []
    for index, parameter in enumerate(module.parameters()):

        def arrived(_: Tensor, index: int = index) -> None:
            found[f"ready {index}"] = time.perf_counter()

        handles.append(parameter.register_post_accumulate_grad_hook(arrived))
    loss = module(batch).square().mean()
    began = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    module.zero_grad()
    for handle in handles:
        handle.remove()
    return {name: seconds - began for name, seconds in found.items()} | {"backward": ended - began}


def predicted(by_rank: Sequence[Samples], cap_mib: float) -> float:
    """Seconds of a step, from everything but the measured steps."""
    slowest = slowest_of(by_rank)
    backward, whole = median(slowest["backward"]), median(slowest["plain"])
    parameters = list(model().parameters())
    ready = [min(median(slowest[f"ready {index}"]), backward) for index in range(len(parameters))]
    total = sum(p.nbytes for p in parameters)
    profile = StepProfile(
        tuple(ParameterSize(p.numel(), p.element_size(), "cpu") for p in parameters), tuple(ready), backward, max(whole - backward, 0.0)
    )
    exchange = Exchange(
        MeasuredCost(tuple((size, median(slowest[f"all-reduce {size}"])) for size in SIZES_BYTES)),
        contention=1.0,
        flatten_bytes_per_second=total / median(slowest["flatten"]),
        unflatten_bytes_per_second=total / median(slowest["unflatten"]),
    )
    return simulate(profile, Caps.of_mb(cap_mib), exchange).step_seconds


def slowest_of(by_rank: Sequence[Samples]) -> Samples:
    return {name: np.max([samples[name] for samples in by_rank], axis=0).tolist() for name in by_rank[0]}


def measured_rows(ranks: Sequence[int], transports: Sequence[str], rounds: int) -> list[Row]:
    """Measures; a row for each step, with the prediction in its details."""
    rows = []
    total = sum(p.nbytes for p in model().parameters())
    for count in ranks:
        with RankPool(count, timeout=timedelta(minutes=10)) as pool:
            for transport in transports:
                by_rank = pool.run(measure, transport, rounds)
                slowest = slowest_of(by_rank)
                for cap in CAPS_MIB:
                    statistics = percentiles(slowest[f"step {cap}"])
                    forecast = predicted(by_rank, cap)
                    details = {
                        "predicted": forecast,
                        "error": forecast / statistics["p50"] - 1,
                        "without_exchange": median(slowest["plain"]),
                        "bucket_cap_mib": cap,
                    }
                    case = f"{transport}, {cap:g} MiB"
                    rows.append(
                        Row(
                            *("validate_machine", case, f"ddpcomm {transport}", "step", "s", count, "float32", {"bytes": total}),
                            **statistics,
                            details=details,
                        )
                    )
    return rows


def machine_table(rows: Sequence[Row]) -> Table:
    errors = [abs(row.details["error"]) for row in rows]
    lines = [
        [
            f"{row.ranks} ranks, {row.case}",
            *(f"{seconds * 1e3:.1f}" for seconds in (row.details["without_exchange"], row.details["predicted"], row.p50)),
            f"{row.details['error']:+.1%}",
        ]
        for row in rows
    ]
    title = f"steps on this CPU, ms: median error {median(errors):.1%}, largest {max(errors):.1%}"
    return Table(title, ["case", "without exchange", "predicted", "measured", "error"], lines)
