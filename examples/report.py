"""What a run leaves: a checkpoint of the plain model, a picture of the losses, a summary, and the lines that compare two replicas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

import ddpcomm
from examples.model import GPT, GPTConfig
from examples.training import History, Replica

CHECKPOINT, LOSS_CURVE, SUMMARY = "checkpoint.pt", "loss.png", "summary.json"


def save_checkpoint(model: GPT, path: Path) -> None:
    """Saves the unwrapped model, so that its keys carry no `module.` prefix."""
    ddpcomm.save_checkpoint({"model": model.state_dict(), "config": asdict(model.config)}, path)


def load_checkpoint(path: Path) -> GPT:
    """The model of a checkpoint, on the CPU; no process group is needed."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    return model


def plot_losses(history: History, path: Path) -> None:
    smooth = list(accumulate(history.training, lambda mean, loss: 0.95 * mean + 0.05 * loss))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(history.training, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step of rank 0")
    axes.plot(smooth, color="tab:blue", label="training, smoothed")
    axes.plot(list(history.validation), list(history.validation.values()), "o-", color="tab:orange", label="validation")
    axes.set(xlabel="step", ylabel="loss (bits per byte)", title="A byte-level GPT on the Python standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def summarize(history: History, replicas: Sequence[Replica]) -> dict[str, Any]:
    """Plain values for a JSON file. Times are medians of whole steps, on this rank."""
    medians = {replica.name: median(replica.step_seconds) for replica in replicas}
    summary: dict[str, Any] = {
        "steps": len(history.training),
        "training_bits_per_byte": history.training[-1],
        "validation_bits_per_byte": {str(step): loss for step, loss in history.validation.items()},
        "median_step_seconds": medians,
    }
    if len(replicas) == 2:
        first, second = medians.values()
        summary |= {
            "bit_identical": history.first_difference is None,
            "first_difference": history.first_difference,
            "ratio": first / second,
        }
    return summary


def save_summary(summary: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n")


def comparison(summary: dict[str, Any]) -> list[str]:
    """Lines that say how the replicas differ: in bits, and in time."""
    lines = [f"median step with {name}: {seconds * 1e3:.1f} ms" for name, seconds in summary["median_step_seconds"].items()]
    if "ratio" in summary:
        names = " / ".join(summary["median_step_seconds"])
        lines.append(f"ratio of the medians, {names}: {summary['ratio']:.3f}")
        if summary["bit_identical"]:
            lines.append(f"all weights were bit-identical after each of {summary['steps']} steps, on every rank")
        else:
            lines.append(f"THE WEIGHTS DIFFER, first after step {summary['first_difference'] + 1}")
    return lines
