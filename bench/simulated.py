"""The steps of well-known models on more GPUs than there are here, by ddpcomm's own simulator. Nothing of it is measured."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec

from bench.rows import Row

SIMULATOR = "ddpcomm.forecast"
MACHINE = "dgx-a100"
MODELS = ("resnet50", "bert_large")
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def simulated_rows(bench: str, models: Sequence[str] = MODELS, machine_name: str = MACHINE, ranks: Sequence[int] = RANKS) -> list[Row]:
    """Two rows, the step and what the exchange adds to it, for each model and number of ranks: `measured` is False. None where this version
    of ddpcomm has no simulator."""
    if find_spec(SIMULATOR) is None:
        return []
    forecast = importlib.import_module(SIMULATOR).forecast
    machine = importlib.import_module("ddpcomm.machines").MACHINES[machine_name]
    workloads = importlib.import_module("ddpcomm.workloads").WORKLOADS
    rows = []
    for name in models:
        workload = workloads[name]()
        profile = workload.profile(workload.step_seconds(workload.batch, machine.flops_per_second * machine.utilisation))
        sizes = {"bytes": profile.total_bytes, "tensors": len(profile.sizes)}
        for count in ranks:
            found = forecast(profile, machine, count)
            for quantity, seconds in (("step", found.step_seconds), ("overhead", found.exposed_seconds)):
                rows.append(
                    Row(
                        *(bench, f"{name} on {machine_name}", "ddpcomm", quantity, "s", count, "float32", sizes),
                        **dict.fromkeys(("p20", "p50", "p80", "p99"), seconds),
                        count=0,
                        measured=False,
                        device=machine_name,
                    )
                )
    return rows
