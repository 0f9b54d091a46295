"""Trains a small GPT on the source of the Python standard library, data-parallel, with ddpcomm.

    torchrun --standalone --nproc-per-node 2 -m examples.train_gpt
    torchrun --standalone --nproc-per-node 2 -m examples.train_gpt --compare    # beside torch's DDP, step by step, on the same batches

Writes a checkpoint, the loss curve, and a summary to --output.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from ddpcomm import DistributedDataParallel
from examples.arguments import at_least, directory, positive
from examples.corpus import load_corpus
from examples.model import GPT, GPTConfig, generate
from examples.report import CHECKPOINT, LOSS_CURVE, SUMMARY, comparison, plot_losses, save_checkpoint, save_summary, summarize
from examples.training import Replica, Settings, train

WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "ddpcomm": DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT on the source of the Python standard library.")
    default, size = Settings(), GPTConfig()
    parser.add_argument(
        "--compare", action="store_true", help="train a second copy with torch's DDP and compare all weights after every step"
    )
    parser.add_argument("--ddp", choices=sorted(WRAPPERS), default="ddpcomm", help="whose DistributedDataParallel (default: %(default)s)")
    parser.add_argument("--backend", help="of torch.distributed (default: nccl where every rank has a GPU, else gloo)")
    parser.add_argument("--gradient-as-bucket-view", action="store_true", help="let gradients be views of the buckets")
    parser.add_argument("--bucket-cap-mb", type=positive, help="size of a bucket in MiB (default: the wrapper's)")
    parser.add_argument("--steps", type=at_least(1), default=default.steps)
    parser.add_argument("--batch-size", type=at_least(1), default=default.batch_size, help="windows a step and rank (default: %(default)s)")
    parser.add_argument("--learning-rate", type=positive, default=default.learning_rate)
    parser.add_argument("--validations", type=at_least(1), default=default.validations, help="how often to validate (default: %(default)s)")
    parser.add_argument("--context", type=at_least(1), default=size.context, help="bytes a window (default: %(default)s)")
    parser.add_argument("--width", type=at_least(1), default=size.width)
    parser.add_argument("--layers", type=at_least(1), default=size.layers)
    parser.add_argument("--heads", type=at_least(1), default=size.heads)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--output", type=directory, default="runs/train_gpt", help="where results go (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--heads {options.heads} does not divide --width {options.width}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if "LOCAL_RANK" not in os.environ:
        sys.exit("This is a program for torchrun: torchrun --standalone --nproc-per-node 2 -m examples.train_gpt")
    device = choose_device()
    dist.init_process_group(options.backend or ("nccl" if device.type == "cuda" else "gloo"))
    try:
        run(options, device)
    finally:
        dist.destroy_process_group()


def choose_device() -> torch.device:
    """A GPU of its own for each rank of this host, or else the CPU, whose cores the ranks share out."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_ranks:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    return torch.device("cpu")


def run(options: argparse.Namespace, device: torch.device) -> None:
    settings = Settings(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=max(1, min(50, options.steps // 10)),
        validations=options.validations,
        seed=options.seed,
    )
    corpus = load_corpus()
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(options.context, options.width, options.heads, options.layers)).to(device)
    names = [options.ddp] + [name for name in WRAPPERS if options.compare and name != options.ddp]
    models = [model] + [copy.deepcopy(model) for _ in names[1:]]
    wrapper_options = {"gradient_as_bucket_view": options.gradient_as_bucket_view}
    if options.bucket_cap_mb is not None:
        wrapper_options["bucket_cap_mb"] = options.bucket_cap_mb
    replicas = [Replica(name, WRAPPERS[name](each, **wrapper_options), settings) for name, each in zip(names, models, strict=True)]

    show = tqdm.write if dist.get_rank() == 0 else lambda text: None
    show(f"{sum(p.numel() for p in model.parameters()):,} parameters, {dist.get_world_size()} ranks, {dist.get_backend()} on {device.type}")
    for split, text, files in (
        ("training", corpus.training, corpus.training_files),
        ("validation", corpus.validation, corpus.validation_files),
    ):
        show(f"{split}: {len(text):,} bytes of {len(files)} files")
    history = train(replicas, corpus, options.context, settings, device, show)
    if dist.get_rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        summary = summarize(history, replicas)
        save_checkpoint(model, options.output / CHECKPOINT)
        save_summary(summary, options.output / SUMMARY)
        plot_losses(history, options.output / LOSS_CURVE)
        lines = [f"\nA sample:\n{generate(model, b'def ', 300)}\n", *comparison(summary)]
        show("\n".join([*lines, f"{CHECKPOINT}, {LOSS_CURVE} and {SUMMARY} are in {options.output}"]))


if __name__ == "__main__":
    main()
