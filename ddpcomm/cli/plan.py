"""`ddpcomm plan`: what a model's step will be on many GPUs, and what would make it shorter."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ddpcomm.argument_checks import check_number
from ddpcomm.cli.output import OUTPUT, show_table
from ddpcomm.errors import ConfigurationError
from ddpcomm.forecast import COMMUNICATION_BOUND, Forecast, Options, Remedy, communication_bound_from, forecast, remedies
from ddpcomm.machines import MACHINES, Machine, machine
from ddpcomm.plan_picture import draw
from ddpcomm.simulate import StepProfile
from ddpcomm.step_source import read_step
from ddpcomm.workloads import WORKLOADS

_MIB = 1 << 20
_MOST_MS = 1e9  # eleven days


class _Findings(NamedTuple):
    """By number of GPUs, each of the last three."""

    name: str
    place: Machine
    profile: StepProfile
    usual: Sequence[Forecast]
    best: Sequence[Forecast]
    help_at: Sequence[Sequence[Remedy]]


def plan(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "resnet50",
    timeline: Annotated[
        Path | None, typer.Option(help="In the model's place: a recorded trace, or a description of a step (JSON).", dir_okay=False)
    ] = None,
    on: Annotated[str, typer.Option("--machine", help=f"One of {', '.join(MACHINES)}, or a JSON file.")] = "dgx-a100",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, up to 10000.")] = "8,16,64,256,1024,10000",
    step_ms: Annotated[float | None, typer.Option(help="A measured step on one GPU; else it follows from work and machine.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a GPU, where no step was measured.")] = None,
    element_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a gradient's element.")] = 4,
    contention: Annotated[float, typer.Option(help="By how much backward slows down beside an all-reduce, 0 to 1.")] = 0.0,
    imbalance: Annotated[float | None, typer.Option(help="Relative standard deviation of the GPUs' speeds.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the scaling curve and the buckets.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Predicts step time, exposed communication and the best buckets for many GPUs, and says what would help."""
    place = machine(on)
    if imbalance is not None:
        place = replace(place, imbalance=imbalance)
    profile, name = _profile(model, timeline, place, step_ms, batch, element_bytes)
    options = Options(contention=contention)
    counts = _counts(gpus)
    usual = [forecast(profile, place, count, options) for count in counts]
    best = [forecast(profile, place, count, replace(options, best_buckets=True)) for count in counts]
    help_at = [remedies(profile, place, count, options) for count in counts]
    found = _Findings(name, place, profile, usual, best, help_at)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(found), indent=1) + "\n")
    else:
        _show(found)
    if picture is not None:
        steps = {f"{usual[-1].ranks} GPUs, default sizes": usual[-1].prediction, f"{best[-1].ranks} GPUs, best": best[-1].prediction}
        draw({"default bucket sizes": usual, "best bucket sizes": best}, steps, picture, f"{name} on {place.name} (predicted)")


def _profile(
    model: str, timeline: Path | None, place: Machine, step_ms: float | None, batch: int | None, element_bytes: int
) -> tuple[StepProfile, str]:
    """The step without exchange, and what to call it."""
    if timeline is not None:
        if step_ms is not None:
            raise ConfigurationError("--timeline has the step's length in it: leave out --step-ms")
        return read_step(timeline).profile, timeline.name
    if model not in WORKLOADS:
        raise ConfigurationError(f"there is no model {model!r}; there are {', '.join(WORKLOADS)}")
    workload = WORKLOADS[model]()
    if step_ms is not None:
        if check_number("--step-ms", step_ms, above=0) > _MOST_MS:
            raise ConfigurationError(f"--step-ms must be {_MOST_MS:g} at most, got {step_ms:g}")
        return workload.profile(step_ms / 1e3, element_bytes), model
    if not place.flops_per_second > 0:
        raise ConfigurationError(f"machine {place.name!r} has no flops_per_second, so that a measured --step-ms is needed")
    samples = batch or workload.batch
    seconds = workload.step_seconds(samples, place.flops_per_second * place.utilisation)
    return workload.profile(seconds, element_bytes), f"{model}, batch {samples}"


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigurationError(f"--gpus must be numbers with commas, got {text!r}") from None
    return counts


def _bucket_sizes(found: Forecast) -> str:
    sizes = [bucket.size_bytes / _MIB for bucket in found.prediction.buckets]
    return f"{len(sizes)}: {min(sizes):.2f} to {max(sizes):.1f} MiB"


def _show(found: _Findings) -> None:
    name, place, profile, usual, best, help_at = found
    OUTPUT.print(
        f"{name} on {place.name}: one GPU's step {profile.step_seconds * 1e3:.2f} ms, backward {profile.backward_seconds * 1e3:.2f} ms; "
        f"gradients {profile.total_bytes / _MIB:.1f} MiB. Everything below is predicted.",
        highlight=False,
    )
    columns = ("GPUs", "step", "exposed", "efficiency", "best: step", "exposed", "efficiency", "best buckets", "what helps most")
    lines = []
    for one, other, helping in zip(usual, best, help_at, strict=True):
        figures = [
            text
            for f in (one, other)
            for text in (f"{f.step_seconds * 1e3:.2f}", f"{f.exposed_seconds * 1e3:.2f}", f"{100 * f.efficiency:.1f}%")
        ]
        most = next(remedy for remedy in helping if not remedy.changes_training)
        saved = one.step_seconds - most.step_seconds
        lines.append([str(one.ranks), *figures, _bucket_sizes(other), f"{most.name}: -{1e3 * saved:.2f}" if saved > 0 else "nothing"])
    show_table("ms a step; exposed communication with default bucket sizes and with the best", columns, lines)
    bound = communication_bound_from(usual)
    OUTPUT.print(
        f"more than {COMMUNICATION_BOUND:.0%} of the step is exposed communication "
        + (f"from {bound} GPUs on (of those asked for)" if bound is not None else "at none of these numbers of GPUs"),
        highlight=False,
    )
    last = usual[-1]
    OUTPUT.print(f"what would help at {last.ranks} GPUs, each alone:", highlight=False)
    for remedy in help_at[-1]:
        saved = last.step_seconds - remedy.step_seconds
        OUTPUT.print(f"  {remedy.name}: {remedy.step_seconds * 1e3:.2f} ms a step, {saved / last.step_seconds:.1%} less", highlight=False)


def _as_json(found: _Findings) -> dict[str, Any]:
    name, place, profile, usual, best, help_at = found

    def point(found: Forecast) -> dict[str, Any]:
        return {
            "step_seconds": found.step_seconds,
            "exposed_seconds": found.exposed_seconds,
            "efficiency": found.efficiency,
            "bucket_bytes": [bucket.size_bytes for bucket in found.prediction.buckets],
        }

    return {
        "model": name,
        "machine": place.to_json(),
        "predicted": True,
        "one_gpu": {"step_seconds": profile.step_seconds, "backward_seconds": profile.backward_seconds, "bytes": profile.total_bytes},
        "gpus": [
            {
                "gpus": one.ranks,
                "default": point(one),
                "best": point(other),
                "remedies": [{"name": remedy.name, "step_seconds": remedy.step_seconds} for remedy in helping],
            }
            for one, other, helping in zip(usual, best, help_at, strict=True)
        ],
        "communication_bound_from_gpus": communication_bound_from(usual),
    }
