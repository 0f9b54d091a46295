"""Finds where an outermost backward begins and ends, without touching the forward's outputs.

A hook on the nodes that made the outputs runs before anything else of the module's backward, in its own graph task, also where
re-entrant checkpoints run further ones inside it. The callback that it queues with the engine runs once, when that graph task is done:
at once, too, where the module is trained inside some other backward. A backward that passes by every output known here is noticed by the
first parameter that receives a gradient. That may happen inside a nested graph task; then its end is carried outward, task by task.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ddpcomm.errors import ConfigurationError
from ddpcomm.untraced import untraced

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class BackwardWatch:
    """Calls back at both ends of every backward.

    Args:
        begin: called with whether the forward behind the output asked for synchronisation, before the first gradient. It may be called
            again, by other outputs, in the same backward.
        end: called once, when the outermost backward has ended.
        interrupted: called when it ended with an exception instead. What it raises is lost.
        parameters: returns the parameters at the time, to tell a backward with `inputs=` from `torch.autograd.grad`.
    """

    def __init__(
        self,
        begin: Callable[[bool], None],
        end: Callable[[], None],
        interrupted: Callable[[], None],
        parameters: Callable[[], Sequence[Tensor]],
    ) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._end = weakref.WeakMethod(end)
        self._interrupted = weakref.WeakMethod(interrupted)
        self._parameters = weakref.WeakMethod(parameters)
        self._callback: _EndCallback | None = None
        self._alive: weakref.ref[_EndCallback] | None = None
        self._likely: tuple[Tensor, Node | None] | None = None
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Any, bool]] = {}

    # ---- where it begins --------------------------------------------------------------------------------------------

    def watch(self, outputs: Iterable[Tensor], synchronize: bool) -> None:
        """Hooks the outputs of a forward that ran with gradients."""
        me = weakref.ref(self)
        if self._leaves:
            self._leaves = {key: watched for key, watched in self._leaves.items() if watched[0]() is not None}
        for output in outputs:
            if not output.requires_grad:
                continue
            if output.grad_fn is None:
                self._watch_leaf(output, synchronize)
            else:
                output.grad_fn.register_prehook(partial(_node_starts, me, synchronize))

    def started_by_parameter(self) -> None:
        """A parameter received a gradient while no backward was known: this is the first sign of one."""
        self._queue(carries_outward=True)

    def _watch_leaf(self, leaf: Tensor, synchronize: bool) -> None:
        """An output without a history, such as a constant that requires grad, or a parameter itself. It has one hook for all forwards since
        its last gradient; one of them that asks for synchronisation speaks for all."""
        leaf_id = id(leaf)
        former = self._leaves.get(leaf_id)
        synchronize = synchronize or (former is not None and former[2])
        self._unwatch_leaf(leaf_id)
        started = partial(_leaf_starts, weakref.ref(self), leaf_id, synchronize)
        self._leaves[leaf_id] = weakref.ref(leaf), leaf.register_hook(started), synchronize  # type: ignore[no-untyped-call]

    def _unwatch_leaf(self, leaf_id: int) -> None:
        watched = self._leaves.pop(leaf_id, None)
        if watched is not None:
            watched[1].remove()

    def _started(self, node: Node, synchronize: bool) -> None:
        begin, parameters = self._begin(), self._parameters()
        if begin is None or parameters is None or not self._accumulates(node, parameters()):
            return
        if not self.running:
            self._queue(carries_outward=False)
        begin(synchronize)

    def _accumulates(self, node: Node, parameters: Sequence[Tensor]) -> bool:
        """Whether the running graph task is a backward, which accumulates into `.grad`, and not `torch.autograd.grad`.

        The first of `parameters`, likely the first to receive a gradient, mostly tells at once. If not: a plain backward runs every node
        below it, so any one leaf tells. With `backward(inputs=...)` only the leaves that were asked for run, and each parameter has to be
        tried.
        """
        if self._likely is None or not parameters or self._likely[0] is not parameters[0]:
            self._likely = (parameters[0], _accumulator(parameters[0])) if parameters else None
        if self._likely is not None and _will_run(self._likely[1]):
            return True
        leaf = node
        while True:
            following = next((below for below, _ in leaf.next_functions if below is not None), None)
            if following is None:
                break
            leaf = following
        if leaf is node:  # torch doesn't count the node that backward starts from among those that it will run
            return _will_run(leaf) is not None
        return bool(_will_run(leaf)) or any(_will_run(_accumulator(p)) for p in parameters)

    @property
    def running(self) -> bool:
        """Whether the backward that was last noticed is still under way."""
        return self._alive is not None and self._alive() is not None

    # ---- where it ends ----------------------------------------------------------------------------------------------

    def _queue(self, *, carries_outward: bool) -> None:
        _refuse_compiled_autograd()
        callback = _EndCallback(self, carries_outward)
        self._alive = weakref.ref(callback, partial(_notice_loss, weakref.ref(self)))
        _queue_callback(callback)

    def _task_ended(self, callback: _EndCallback) -> None:
        node = torch._C._current_autograd_node()
        if callback.carries_outward and node is not None and self._carry_outward(node, callback):
            return
        self._callback = None
        self._alive = None
        end = self._end()
        if end is not None:
            end()

    def _carry_outward(self, node: Node, callback: _EndCallback) -> bool:
        """`node` belongs to the graph task around the one that has just ended: waits for that one's end instead."""
        self._callback = callback  # between the two graph tasks nobody else holds it
        handles: list[Any] = []
        requeue = partial(_requeue, self, callback, handles)
        handles += [following.register_prehook(requeue) for following, _ in node.next_functions if following is not None]
        return bool(handles)

    def forget(self) -> None:
        """Drops the backward that was last noticed, however it stands."""
        self._alive = None
        self._callback = None

    def close(self) -> None:
        """Takes its hooks off leaves, which may outlive the model. Idempotent."""
        self.forget()
        for leaf_id in list(self._leaves):
            self._unwatch_leaf(leaf_id)


class _EndCallback:
    """What the engine calls at the end of a graph task. A graph task that fails drops it uncalled, which is how that is noticed.

    `carries_outward`: whether the backward goes on as long as there is a graph task around the one that has ended.
    """

    def __init__(self, watch: BackwardWatch, carries_outward: bool) -> None:
        self._watch = watch
        self.carries_outward = carries_outward

    @untraced
    def __call__(self) -> None:
        self._watch._task_ended(self)


def _refuse_compiled_autograd() -> None:
    """Under compiled autograd the engine drops callbacks without a word: gradients would silently stay each rank's own.

    Raises:
        ConfigurationError: the backward under way is one.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise ConfigurationError(
            "this backward runs under compiled autograd, which can't be synchronised: switch off torch._dynamo.config.compiled_autograd, "
            'and let torch._dynamo.config.optimize_ddp be "ddp_optimizer" or False; torch.compile of the model is fine'
        )


@untraced
def _notice_loss(watch: weakref.ref[BackwardWatch], alive: weakref.ref[_EndCallback]) -> None:
    owner = watch()
    if owner is None or owner._alive is not alive:
        return
    interrupted = owner._interrupted()
    if interrupted is not None:
        interrupted()


@untraced
def _requeue(watch: BackwardWatch, callback: _EndCallback, handles: list[Any], *_: Any) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
    if watch._callback is callback:
        watch._callback = None
        _queue_callback(callback)


@untraced
def _node_starts(watch: weakref.ref[BackwardWatch], synchronize: bool, _: Any) -> None:
    owner = watch()
    running = torch._C._current_autograd_node()
    if owner is not None and running is not None:
        owner._started(running, synchronize)


@untraced
def _leaf_starts(watch: weakref.ref[BackwardWatch], leaf_id: int, synchronize: bool, _: Tensor) -> None:
    owner = watch()
    if owner is not None:
        owner._unwatch_leaf(leaf_id)
        owner._started(torch._C._current_autograd_node(), synchronize)


def _accumulator(parameter: Tensor) -> Node | None:
    return torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None


def _will_run(leaf: Node | None) -> bool | None:
    """Whether the running graph task accumulates into this leaf; None if autograd.grad captures its gradient instead."""
    if leaf is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # torch refuses the question for a leaf that is captured
        return None
