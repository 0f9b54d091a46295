"""Under what circumstances a forward runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_transformed() -> bool:
    """Whether torch.func transforms what runs now: it takes its gradients by itself, on this rank alone."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_local() -> bool:
    """Whether the forward that runs now is no step of training: a checkpoint's recomputation during backward, or a transformed one."""
    return torch._C._current_graph_task_id() != -1 or is_transformed()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range in a profiler's trace. Where none is running, this costs 0.2 us instead of 10."""
    return torch.autograd.profiler.record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()
