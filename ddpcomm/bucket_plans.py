"""`bucket_cap_mb="auto"`, `plan=` and `save_plan()`: buckets that were measured, and not given by their sizes."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ddpcomm.auto_tuning import AutoTuner, signature
from ddpcomm.errors import ConfigurationError, PlanError
from ddpcomm.reducer import Reducer
from ddpcomm.tuning import Plan

AUTO = "auto"


class BucketPlans(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    _reducer: Reducer
    _comm_hook: Any
    _plan: Plan | None
    _tunes: bool

    def _take_plan(self, bucket_cap_mb: object, plan: Plan | str | PathLike[str] | None) -> None:
        """Reads the constructor's arguments.

        Raises:
            ConfigurationError: sizes and a plan were both given, or a text other than "auto".
            PlanError: the file can't be read, or holds no plan.
        """
        if plan is not None and bucket_cap_mb is not None:
            raise ConfigurationError(f"give bucket_cap_mb or plan, not both, got bucket_cap_mb={bucket_cap_mb!r}")
        self._tunes = bucket_cap_mb == AUTO
        if isinstance(bucket_cap_mb, str) and not self._tunes:
            raise ConfigurationError(f'bucket_cap_mb must be a number of MiB or "auto", got {bucket_cap_mb!r}')
        self._plan = plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan))

    def _use_plan(self) -> None:
        """Lays the buckets out by the plan, or begins to look for one. Local.

        Raises:
            PlanError: the plan was made for another model.
        """
        reducer = self._reducer
        if self._plan is not None:
            self._plan.check(signature(reducer))
            reducer.bucket_ends = frozenset(self._plan.ends)
            reducer.arrange()
        elif self._tunes and reducer.communicator.world_size > 1:
            reducer.tuner = AutoTuner(reducer, self._tuned)

    def _tuned(self, plan: Plan | None) -> None:
        self._tunes = False
        self._plan = plan

    @property
    def plan(self) -> Plan | None:
        """The plan that the buckets follow; None where they have the default sizes or those that were given. Local."""
        return self._plan

    def save_plan(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON, for `plan=` of another run. Local: the same on every rank, so that one file is enough.

        Raises:
            PlanError: there is none: tuning has not ended yet, or has found nothing better than the default sizes.
            OSError: the file can't be written.
        """
        if self._plan is None:
            why = "tuning has not ended yet" if self._tunes else 'the buckets have the default sizes; bucket_cap_mb="auto" looks for a plan'
            raise PlanError(f"there is no plan to save: {why}")
        self._plan.save(Path(path))
