"""The end of a reduction: hear what the ranks have to say, act on it alike everywhere, put the averages in place."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ddpcomm.agreement import Agreement, Report, agree, signatures
from ddpcomm.arrangement import Arrangement
from ddpcomm.errors import (
    BackwardInterruptedError,
    CollectiveMismatchError,
    DDPCommError,
    LateGradientError,
    LostGradientError,
    RankMismatchError,
)
from ddpcomm.layout_check import require_same_layout
from ddpcomm.listing import listed
from ddpcomm.memory import has_memory
from ddpcomm.nonfinite import hear, hear_sparse, refuse
from ddpcomm.parameters import ParameterSet
from ddpcomm.reduction import Reduction
from ddpcomm.status import Notice, Status

if TYPE_CHECKING:
    from torch import Tensor

    from ddpcomm.reducer import Reducer


def collect_notices(reducer: Reducer, reduction: Reduction, fires: Sequence[int]) -> set[Notice]:
    """What this rank has to say at the end of a backward."""
    _look_for_lost(reducer, reduction)
    _look_for_unfit(reducer, reduction, reducer.parameters)
    _look_at_sparse(reduction, reducer.parameters, fires)
    idle = [index for index, count in enumerate(fires) if not count] if 0 in fires else []
    _look_for_unhooked(reducer, idle)
    found = set()
    if reducer.failure is not None or reduction.failure is not None:
        found.add(Notice.FAILED)
    if reducer.late:
        found.add(Notice.LATE)
    frozen = any(not reducer.parameters.managed[index].parameter.requires_grad for index in idle)
    if reducer.changed or reduction.misfits or frozen:
        found.add(Notice.CHANGED)
    if not reducer.learned and reducer.communicator.rank == 0 and any(fires):
        found.add(Notice.LEARNED)
    return found


def _look_for_lost(reducer: Reducer, reduction: Reduction) -> None:
    unfit = {misfit.parameter for misfit in reduction.misfits}
    lost = [i for i in reduction.lost() if i not in reducer.late and i not in unfit]
    if lost:
        names = listed([reducer.parameters.managed[index].name for index in lost])
        reducer.fail_at_end(
            LostGradientError(
                f"the gradient of {names} was taken away or exchanged during backward, before it was averaged. Use it after "
                "backward, or in a hook registered with register_post_accumulate_grad_hook, which runs once the average is there"
            )
        )


def _look_for_unfit(reducer: Reducer, reduction: Reduction, parameters: ParameterSet) -> None:
    """What doesn't fit is averaged later, as a newcomer, where its parameter has changed or turned out to be sparse. Else it can't be."""
    managed = parameters.managed
    strays = [managed[misfit.parameter].name for misfit in reduction.misfits if misfit.stray]
    if strays:
        reducer.fail_at_end(
            LostGradientError(
                f"the gradient of {listed(strays)} lies in a bucket's memory, at another parameter's place, where it was written over: "
                "with gradient_as_bucket_view=True gradients are views of buckets, so give a parameter another one's gradient as a clone"
            )
        )
    found = [
        f"{m.name} is {list(m.shape)} {m.dtype} on {m.parameter.device}, its gradient {list(gradient.shape)} {gradient.dtype} on "
        f"{gradient.device}" + ("" if has_memory(gradient) else f" and a {type(gradient).__name__} without memory of its own")
        for m in (managed[misfit.parameter] for misfit in reduction.misfits if not misfit.sparse and not misfit.stray)
        if m.unchanged and (gradient := m.parameter.grad) is not None
    ]
    if found:
        reducer.fail_at_end(
            LostGradientError(
                f"these gradients don't fit their parameters: {listed(found, '; ')}. Where gradients are to have another dtype, set "
                "Parameter.grad_dtype to it, on every rank"
            )
        )


def _look_for_unhooked(reducer: Reducer, idle: Sequence[int]) -> None:
    unhooked = reducer.countdown.unhooked(idle)
    if unhooked:
        names = listed([reducer.parameters.managed[index].name for index in unhooked])
        reducer.hook_again()
        reducer.fail_at_end(
            LostGradientError(
                f"{names} had lost the hook that notices its gradient, which was not averaged: torch.utils.swap_tensors does that, and so"
                " do conversions with torch.__future__.set_swap_module_params_on_conversion(True). It is hooked again: clear the gradients "
                "(zero_grad), and go on"
            )
        )


def settle(reducer: Reducer, reduction: Reduction, used: list[bool], fires: Sequence[int], *, void: bool) -> None:
    """Waits for a reduction whose buckets have all gone out, and finishes it. Collective.

    Args:
        reducer: whose reduction it is.
        reduction: it.
        used: by parameter, whether this rank used it.
        fires: how often each received a gradient in this backward.
        void: this rank takes part for the others' sake. What it holds in tensors of its own stays as it is; views show the averages.

    Raises:
        SynchronizationError, RankMismatchError, CommHookError: on every rank.
        CommunicationError: a collective failed.
    """
    if _may_defer(reducer, reduction, used, void=void):
        reducer.deferred = reduction.wait_and_defer()
        _put_in_place(reducer, reduction, fires, used, (), void=void)
        return
    status = reduction.wait()
    _raise_for(status, reducer.communicator.rank)
    if status.notices <= {Notice.NONFINITE}:
        nonfinite = hear(reducer, reduction, status)
        if not nonfinite:
            _put_in_place(reducer, reduction, fires, used, (), void=void)
            nonfinite = hear_sparse(reduction, _averaged_sparse(reduction, reducer.parameters))
        if nonfinite:
            refuse(reducer, nonfinite, void=void)
        return
    sparse = _sparse_names(reducer, reduction)
    present = ParameterSet(reducer.module, reducer.ignored, sparse)
    agreement = _agree(reducer, reduction, present, fires)
    reducer.learned = reducer.learned or Notice.LEARNED in status
    if agreement.late and Notice.NONFINITE not in status:
        _refuse_late(reducer, agreement)
        reduction = reducer.new_reduction()
        reduction.launch_rest(used, set, void=void, skip_unused=reducer.options.skip_unused_buckets)
        status = reduction.wait()
        _raise_for(status, reducer.communicator.rank)
    nonfinite = hear(reducer, reduction, status)
    present = ParameterSet(reducer.module, reducer.ignored, agreement.sparse)
    if not nonfinite:
        _refuse_lopsided(reducer, agreement)
        _set_apart(present, agreement.newcomers)
        _put_in_place(reducer, reduction, fires, used, agreement.newcomers, void=void)
        nonfinite = hear_sparse(reduction, _averaged_sparse(reduction, reducer.parameters))
        nonfinite = _average_newcomers(reducer, present, agreement.newcomers, void=void) or nonfinite
    reducer.adopt(present, agreement.ready_order, agreement.fires)
    require_same_layout(reducer)
    if nonfinite:
        refuse(reducer, nonfinite, void=void)


def _may_defer(reducer: Reducer, reduction: Reduction, used: Sequence[bool], *, void: bool) -> bool:
    """Whether this rank can go on without hearing the others: it has nothing to say itself, and uses everything itself."""
    silent = not void and not reduction.said_something and reducer.learned and reducer.tuner is None
    return reducer.defers_status and silent and all(used) and not reducer.arrangement.sparse


def _agree(reducer: Reducer, reduction: Reduction, present: ParameterSet, fires: Sequence[int]) -> Agreement:
    """What the ranks have to say. An error of this rank's own is the cause of the one that all of them raise."""
    try:
        return agree(reducer.communicator, _report(reducer, reduction, present, fires))
    except DDPCommError as error:
        raise error from (reducer.failure or reduction.failure)


def settle_deferred(reducer: Reducer, status: Status) -> None:
    """Hears what the ranks had to say in a backward that this one has put behind it. Collective, if somebody said something.

    The averages of that backward are in place, and may have been used. Whatever made them wrong is an error here.

    Raises:
        SynchronizationError, RankMismatchError, CommHookError: that backward's, on every rank.
    """
    _raise_for(status, reducer.communicator.rank)
    if not status.notices:
        return
    nothing = [0] * len(reducer.parameters.managed)
    present = ParameterSet(reducer.module, reducer.ignored, _sparse_names(reducer, reducer.new_reduction()))
    agreement = _agree(reducer, reducer.new_reduction(), present, nothing)
    if agreement.late:
        _refuse_late(reducer, agreement)
    _refuse_lopsided(reducer, agreement)
    reducer.adopt(present, agreement.ready_order, agreement.fires)
    require_same_layout(reducer)


def _raise_for(status: Status, rank: int) -> None:
    if status.mixed:
        raise CollectiveMismatchError(
            f"rank {rank} reduced buckets of one model with another model's on other ranks: "
            "run the backwards of all models in the same order on every rank"
        )
    if Notice.INTERRUPTED in status:
        who = "several ranks" if status.interrupted_rank is None else f"rank {status.interrupted_rank}"
        raise BackwardInterruptedError(
            f"backward ended with an exception on {who}: this step has no averaged gradients on any rank. "
            "Clear the gradients (zero_grad) and skip the step, or end the job"
        )


def _sparse_names(reducer: Reducer, reduction: Reduction) -> set[str]:
    managed = reducer.parameters.managed
    seen = {managed[misfit.parameter].name for misfit in reduction.misfits if misfit.sparse}
    if reducer.changed:  # newcomers have not been looked at yet
        present = ParameterSet(reducer.module, reducer.ignored).managed
        seen |= {m.name for m in present if m.parameter.grad is not None and m.parameter.grad.layout is not torch.strided}
    return seen | {m.name for m in managed if m.sparse}


def _report(reducer: Reducer, reduction: Reduction, present: ParameterSet, fires: Sequence[int]) -> Report:
    names = reducer.parameters.names
    failure = reducer.failure or reduction.failure
    expected = reducer.countdown.expected
    newcomers = tuple(present.managed[index].name for index in present.newcomers(reducer.parameters.managed))
    return Report(
        signatures=signatures(present),
        failure=None if failure is None else (type(failure), str(failure)),
        late=tuple(names[index] for index in sorted(reducer.late)),
        ready_order=tuple(names[index] for index in reducer.ready_order()),
        fires={name: max(count, before) for name, count, before in zip(names, fires, expected, strict=True)},
        sparse=tuple(sorted(m.name for m in present.managed if m.sparse)),
        newcomers=newcomers,
        in_buckets=tuple(names[index] for index in reducer.arrangement.in_buckets() if names[index] not in newcomers),
    )


def _refuse_late(reducer: Reducer, agreement: Agreement) -> None:
    """Gradients that were not written over yet can simply be reduced once more; those that lie in a bucket were.

    Raises:
        LateGradientError: some do, or a hook with a memory of its own has seen them, or some rank may have used them by now.
    """
    if not agreement.in_buckets and reducer.hook is None and not reducer.defers_status:
        return
    _go_on_with(reducer, agreement)
    late = "; ".join(f"{name} (on rank {', '.join(map(str, ranks))})" for name, ranks in agreement.late.items())
    raise LateGradientError(
        f"these parameters received a gradient more often than in earlier backwards, after their bucket had gone out: {late}. "
        "The gradients of this step are void: clear them (zero_grad), and go on. Where the number of re-entrant checkpoints of a layer "
        "varies, use gradient_as_bucket_view=False and no communication hook, and on CUDA error_on_unsynchronized=True"
    )


def _refuse_lopsided(reducer: Reducer, agreement: Agreement) -> None:
    """A parameter that is new on some ranks only was reduced, against nothing, on the others; what lies in a bucket is lost by that.

    Raises:
        RankMismatchError: its gradient does, or some rank may have used it by now.
    """
    if not agreement.unanimous and (reducer.defers_status or not agreement.newcomers.isdisjoint(agreement.in_buckets)):
        _go_on_with(reducer, agreement)
        raise RankMismatchError(
            f"{', '.join(sorted(agreement.newcomers))} was replaced, cast or unfrozen on some ranks only, and its gradient lies in a "
            "bucket that has been reduced already. The gradients of this step are void: clear them (zero_grad), and go on. "
            "Change parameters on every rank, between two steps"
        )


def _go_on_with(reducer: Reducer, agreement: Agreement) -> None:
    """Lays out what the ranks agree on, for the steps to come."""
    reducer.adopt(ParameterSet(reducer.module, reducer.ignored, agreement.sparse), agreement.ready_order, agreement.fires)


def _put_in_place(
    reducer: Reducer, reduction: Reduction, fires: Sequence[int], used: list[bool], newcomers: Collection[str], *, void: bool
) -> None:
    reduction.average_sparse(reducer.parameters.parameters, used, void=void)
    if void:
        return
    somewhere = reduction.used_somewhere(used)
    names = reducer.parameters.names
    places = [flag and name not in newcomers for flag, name in zip(somewhere, names, strict=True)] if newcomers else somewhere
    reduction.write_back(places)
    idle = reducer.record.averaged(reduction, reducer.parameters, fires, used, somewhere)
    if idle and reducer.warns_of_unused:
        reducer.warns_of_unused = False
        warnings.warn(
            f"no rank used these parameters in this backward, so their gradients stay as they were: {', '.join(idle)}. "
            "This is told once; find_unused_parameters=True says that it is meant",
            stacklevel=2,
        )


def _look_at_sparse(reduction: Reduction, parameters: ParameterSet, used: Sequence[int]) -> None:
    """Whether the sparse gradients of this rank's own are finite: by parameter, whether it used it."""
    if reduction.screen is not None:
        mine = [(parameters.names[index], parameters.parameters[index].grad) for index in reduction.arrangement.sparse if used[index]]
        reduction.screen.look_at_sparse((name, gradient) for name, gradient in mine if gradient is not None)


def _averaged_sparse(reduction: Reduction, parameters: ParameterSet) -> list[tuple[str, Tensor]]:
    averaged = [(parameters.names[index], parameters.parameters[index].grad) for index in reduction.averaged_sparse()]
    return [(name, gradient) for name, gradient in averaged if gradient is not None]


def _set_apart(present: ParameterSet, names: Collection[str]) -> None:
    """Gives gradients memory of their own. Autograd makes some that share it with others', which are written to before these go out."""
    for member in present.managed:
        gradient = member.parameter.grad
        if member.name in names and gradient is not None:
            member.parameter.grad = gradient.clone()


def _average_newcomers(reducer: Reducer, present: ParameterSet, names: Collection[str], *, void: bool) -> str:
    """Averages gradients that had no place in any bucket, in buckets of their own. Collective. Returns what is not finite in them."""
    order = [index for index, name in enumerate(present.names) if name in names]
    if not order:
        return ""
    arrangement = Arrangement(present.managed, order, reducer.options.caps, reducer.communicator)
    reduction = reducer.new_reduction(arrangement)
    used = [p.grad is not None and not void for p in present.parameters]
    _look_at_sparse(reduction, present, used)

    def notices() -> set[Notice]:
        _look_for_unfit(reducer, reduction, present)
        return {Notice.FAILED} if reducer.failure is not None else set()

    while reduction.next < len(arrangement.buckets):
        reduction.launch(used, notices, void=void)
    reduction.average_sparse(present.parameters, used, void=void)
    status = reduction.wait()
    _raise_for(status, reducer.communicator.rank)
    if Notice.FAILED in status:
        _agree(reducer, reducer.new_reduction(), present, [0] * len(reducer.parameters.managed))
    nonfinite = hear(reducer, reduction, status)
    if not void and not nonfinite:
        somewhere = reduction.used_somewhere(used)
        reduction.write_back(somewhere)
        elsewhere = zip(present.parameters, used, somewhere, strict=True)
        reducer.record.brought += [p for p, here, anywhere in elsewhere if anywhere and not here]
    return nonfinite or hear_sparse(reduction, _averaged_sparse(reduction, present))
