"""`@on_two_ranks`: a test whose body runs on both ranks of the session's pool."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.ranks import RankContext, RankPool


def on_two_ranks(body: Callable[..., Any]) -> Callable[..., None]:
    """Makes `body(rank, ...)` a test. Its further arguments are pytest's, such as parametrised ones, and must pickle."""
    name = body.__name__

    @functools.wraps(body)
    def test(two_ranks: RankPool, **arguments: Any) -> None:
        two_ranks.run(_call, body.__module__, name, arguments)

    signature = inspect.signature(body)
    pool = inspect.Parameter("two_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = signature.replace(parameters=[pool, *list(signature.parameters.values())[1:]])  # type: ignore[attr-defined]
    test.body = body  # type: ignore[attr-defined]
    return test


def _call(rank: RankContext, module: str, name: str, arguments: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name).body(rank, **arguments)


def exchange(value: Any) -> list[Any]:
    """`value` of every rank, by rank, over a group that nothing under test uses."""
    group = dist.new_group()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def same_on_all_ranks(value: Any) -> Any:
    """`value`, once it is known to be equal on every rank."""
    values = exchange(value)
    assert all(other == values[0] for other in values), f"the ranks differ: {values}"
    return value
