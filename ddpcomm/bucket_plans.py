"""`bucket_cap_mb="auto"`, `plan=` and `save_plan()`: buckets that were measured, and not given by their sizes."""

from __future__ import annotations

import hashlib
from os import PathLike
from typing import Any

from ddpcomm.argument_checks import check_path
from ddpcomm.auto_tuning import AutoTuner, signature
from ddpcomm.errors import ConfigurationError, PlanError
from ddpcomm.reducer import Reducer
from ddpcomm.transport_choice import AUTO, TransportChoice
from ddpcomm.tuning import Plan


class BucketPlans(TransportChoice):
    """Base of DistributedDataParallel, which has the attributes named here."""

    _reducer: Reducer
    _comm_hook: Any
    _plan: Plan | None
    _auto: bool
    _tunes: bool

    def _take_plan(self, bucket_cap_mb: object, bucket_cap_mb_list: object, plan: Plan | str | PathLike[str] | None) -> None:
        """Reads the constructor's arguments.

        Raises:
            ConfigurationError: sizes and a plan were both given, or a text other than "auto".
            PlanError: the file can't be read, or holds no plan.
        """
        self._plan, self._auto = None, bucket_cap_mb == AUTO
        self._tunes = self._auto
        sizes = bucket_cap_mb_list if bucket_cap_mb is None else bucket_cap_mb
        if (plan is not None and sizes is not None) or (self._auto and bucket_cap_mb_list is not None):
            raise ConfigurationError(
                f'give sizes, "auto" or a plan, and only one of them; got bucket_cap_mb={bucket_cap_mb!r}, '
                f"bucket_cap_mb_list={bucket_cap_mb_list!r}, plan={plan!r}"
            )
        if isinstance(bucket_cap_mb, str) and not self._tunes:
            raise ConfigurationError(f'bucket_cap_mb must be a number of MiB or "auto", got {bucket_cap_mb!r}')
        if plan is not None:
            self._plan = plan if isinstance(plan, Plan) else Plan.load(check_path("plan", plan))

    def _describe_plan(self) -> str | None:
        """Equal on two ranks if their plans are."""
        plan = self._plan
        if plan is None:
            return None
        decided = (plan.parameters, plan.ends, plan.communicators, plan.max_ctas)
        return hashlib.sha256(repr(decided).encode()).hexdigest()[:16]

    def _use_plan(self, *, check: bool) -> None:
        """Lays the buckets out by the plan, or begins to look for one. Local.

        Args:
            check: whether the plan must have been made for just these parameters. Those of a copy may have changed since then.

        Raises:
            PlanError: the plan was made for another model.
        """
        reducer = self._reducer
        if self._plan is not None:
            if check:
                self._plan.check(signature(reducer))
            reducer.bucket_ends = frozenset(self._plan.ends)
            reducer.arrange()
        elif (self._tunes or self._tunes_options) and reducer.communicator.world_size > 1:
            reducer.tuner = AutoTuner(self, reducer, self._tuned, buckets=self._tunes)

    def _plan_again(self) -> None:
        """The ranks are others than before. Local; all of them must do so."""
        if self._auto or self._undecided:
            self._plan, self._tunes, self._tunes_options = None, self._auto, bool(self._undecided)
        self._use_plan(check=False)

    def _tuned(self, plan: Plan | None) -> None:
        self._tunes = self._tunes_options = False
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
        file = check_path("save_plan: path", path)
        if self._plan is None:
            why = (
                "tuning has not ended yet"
                if self._reducer.tuner is not None
                else 'the buckets have the default sizes; bucket_cap_mb="auto" looks for a plan'
            )
            raise PlanError(f"there is no plan to save: {why}")
        self._plan.save(file)
