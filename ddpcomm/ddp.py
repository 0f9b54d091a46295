"""DistributedDataParallel: a thin module over the reducer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ddpcomm import arguments
from ddpcomm.argument_checks import check_flag, check_timeout
from ddpcomm.bucket_plans import BucketPlans
from ddpcomm.comm.factory import create_communicator
from ddpcomm.comm.join import Joinable
from ddpcomm.comm.process_group import resolve
from ddpcomm.comm.torch_ddp import (
    ProcessGroup,
    TorchDDP,
    active_module,
    count_optimizer_hooks,
    take_over_optimizer_hooks,
)
from ddpcomm.compat import TorchNames
from ddpcomm.copies import Copies
from ddpcomm.errors import CommunicationError, ConfigurationError, DDPCommError, RankMismatchError
from ddpcomm.forward_context import is_local, is_transformed, profiled
from ddpcomm.gradient_queries import GradientQueries
from ddpcomm.layout_check import require_same_layout
from ddpcomm.measurements import Measurements
from ddpcomm.mixed_precision import Precision, ShortParameters, cast_buffers
from ddpcomm.model_number import next_tag
from ddpcomm.module_state import ModuleBuffers, broadcast_tensors
from ddpcomm.named_tensors import named_buffers, named_parameters
from ddpcomm.nonfinite import NonFinite
from ddpcomm.outputs import find_tensors
from ddpcomm.recovery import Recovery
from ddpcomm.reducer import Reducer
from ddpcomm.reports import Reporter
from ddpcomm.statistics import Statistics
from ddpcomm.step_guard import StepGuard
from ddpcomm.transport_choice import AUTO
from ddpcomm.tuning import Plan
from ddpcomm.uneven_inputs import UnevenInputs
from ddpcomm.untraced import untraced
from ddpcomm.verify import model_signatures, require_same_model
from ddpcomm.whereabouts import FORWARD, OWN_CODE


class DistributedDataParallel(BucketPlans, Measurements, GradientQueries, Copies, Recovery, TorchNames, UnevenInputs, Joinable):
    """Data-parallel training of `module`: every rank holds a replica, and after each backward every gradient is the average over ranks.

    Takes the place of `torch.nn.parallel.DistributedDataParallel`, whose constructor arguments it takes with the same meaning, and of
    which it counts as an instance. Making one is collective, unless `init_sync=False`.

    After a backward that synchronises, every trainable parameter's `.grad` is the average over the ranks, bit for bit the same on all of
    them; or every rank raises the same typed error. A parameter that no rank used keeps its `.grad` as it was. To the other ranks, a rank
    whose backward raises before it reaches the module's outputs has skipped a step: docs/reliability.md.

    Args:
        module: the model, on the device where it is to be trained.
        device_ids, output_device: for a module on one GPU: that GPU, to which inputs are moved.
        dim: kept for torch's signature.
        broadcast_buffers: deprecated by torch for `forward_sync_buffers`.
        init_sync: compare the ranks' models and options, and give all ranks rank 0's parameters and buffers.
        process_group: which ranks; None means the default group.
        bucket_cap_mb: size of a bucket in MiB; 0 sends every gradient by itself, None means 25, with a first one of 1. "auto" chooses the
            buckets in the first backwards, from what they and the ranks' all-reduces take: see `ddpcomm.auto_tuning`.
        find_unused_parameters: unused parameters are expected. They are always dealt with; this only ends the one warning about them.
        check_reduction: deprecated by torch; has no effect.
        gradient_as_bucket_view: `.grad` becomes the bucket's memory: no copy back, and the gradients are held once.
        static_graph: every backward is going to use the same parameters in the same way. Nothing depends on it here.
        delay_all_reduce_named_params, param_to_hook_all_reduce: parameters to average last, at the end of backward.
        mixed_precision: torch's `_MixedPrecision`: forward and backward in lower precision, over full-precision parameters and gradients.
        device_mesh: a one-dimensional mesh, instead of `process_group`.
        skip_all_reduce_unused_params: buckets in which nothing was used stay at home; must be so on all ranks alike.
        bucket_cap_mb_list: sizes of the first, second, ... bucket in MiB; the last entry goes on for ever.
        batched_grad_copy: always on here.
        forward_sync_buffers: before every training forward all ranks get rank 0's buffers; None means yes.
        transport: of the communicator: "auto", "shared_memory", "hierarchical", "process_group", "nccl".
        transport_options: of a transport that is named, such as `{"communicators": 3}`: see `create_communicator`. With nccl,
            "communicators" and "max_ctas" may be "auto": chosen in the first backwards, by trying some.
        error_on_unsynchronized: an optimizer's step on gradients that are not averaged raises `UnsynchronizedGradientError`. On CUDA the
            host then waits at the end of every backward to hear whether it went well on all ranks; else it hears of it when the next one
            begins, and raises then.
        plan: buckets as another run has chosen and saved them (`save_plan`), in place of sizes.
        timeout: time limit of every wait for other ranks; None means DDPCOMM_TIMEOUT_SECONDS, else the process group's own. When it has
            passed, the error says where the ranks that were waited for had last been: see `ddpcomm.reports`.
        nonfinite: what to do when gradients are inf or nan, on any rank or in their sum. "ignore" doesn't look. "raise" raises
            `NonFiniteGradientError`, which names parameters and ranks, at the end of that backward on every rank. "skip" takes every
            gradient away instead (`.grad` is None), so that an optimizer's step changes nothing, and counts in `stats()`.

    Raises:
        ConfigurationTypeError: `timeout` is no timedelta.
        ConfigurationError: arguments that can't be served, or a module without trainable parameters.
        RankMismatchError: the ranks' models or options differ; on every rank.
        CommunicationError: a rank is lost, or did not arrive in time.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Tensor]] | None = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        error_on_unsynchronized: bool = False,
        plan: Plan | str | PathLike[str] | None = None,
        timeout: timedelta | None = None,
        nonfinite: NonFinite = "ignore",
    ) -> None:
        flags = {
            "broadcast_buffers": broadcast_buffers,
            "init_sync": init_sync,
            "find_unused_parameters": find_unused_parameters,
            "check_reduction": check_reduction,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "batched_grad_copy": batched_grad_copy,
            "forward_sync_buffers": forward_sync_buffers,
            "error_on_unsynchronized": error_on_unsynchronized,
        }
        arguments.check_types(module, flags, transport, device_ids)
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._timeout = None if timeout is None else check_timeout("timeout", timeout)
        self.process_group = resolve(arguments.process_group_of(process_group, device_mesh))
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if check_reduction:
            arguments.warn_check_reduction()
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self._precision = Precision.of(mixed_precision)
        self.forward_sync_buffers, sync_buffers_at_init = arguments.buffer_synchronization(broadcast_buffers, forward_sync_buffers)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.parameters_to_ignore = arguments.ignored_names(module)
        self._delayed = arguments.delayed_names(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._options = arguments.reducer_options(
            None if isinstance(bucket_cap_mb, str) else bucket_cap_mb,
            bucket_cap_mb_list,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            error_on_unsynchronized=error_on_unsynchronized,
            nonfinite=nonfinite,
        )
        self._bucket_cap_mb_list = bucket_cap_mb_list
        self._take_transport(transport, transport_options)
        self._tag = 0
        self._divide_by_initial_world_size = True
        self._hook_name = ""
        self._comm_hook = None
        self._buffer_hook = None
        self.module = module
        failure: DDPCommError | None = None
        try:
            self._take_plan(bucket_cap_mb, bucket_cap_mb_list, plan)
            parameters = arguments.check_module(module, self.parameters_to_ignore)
            self._placement = arguments.placement(parameters, device_ids, output_device)
        except ConfigurationError as error:
            if not init_sync or self.process_group.size() == 1:
                raise
            failure = error.with_traceback(None)  # which would lead back to here
            self._placement = arguments.anywhere()
        self._error_on_unsynchronized = error_on_unsynchronized
        self._reports = Reporter()
        self._reports.connect(self.process_group)
        try:
            with self._reports.watching("construction"):
                if init_sync:
                    self._require_same_transport(self.process_group)
                options = self._decided_options(self._plan)
                self._communicator = create_communicator(self.process_group, self._placement.device, transport, **options)
                if init_sync:
                    # A model that was refused may have nothing to describe, as where parameters aren't initialised yet.
                    signatures = [] if failure else model_signatures(module, self.parameters_to_ignore, self._describe_options())
                    require_same_model(self._communicator, signatures, failure)
                    self._broadcast_state(with_buffers=sync_buffers_at_init)
                    self._tag = next_tag(self._communicator)
                cast_buffers(module, self._precision.buffers, self.parameters_to_ignore)
                self._short_parameters = ShortParameters(module, self._precision.parameters, self.parameters_to_ignore)
                self._start(check_plan=True)
                if init_sync:
                    require_same_layout(self._reducer)
        except BaseException:  # whose traceback keeps this object alive
            self._give_up_construction()
            raise

    def _start(self, *, check_plan: bool) -> None:
        """What can't be copied or pickled. Local."""
        self._statistics = Statistics()
        self._module_buffers = ModuleBuffers(self.module, self.parameters_to_ignore)
        me = weakref.ref(self)

        def wants_synchronization() -> bool:
            owner = me()
            return owner is not None and owner.require_backward_grad_sync

        self._reducer = Reducer(
            self.module,
            self._communicator,
            self._options,
            ignored=self.parameters_to_ignore,
            delayed=self._delayed,
            tag=self._tag,
            wants_synchronization=wants_synchronization,
            statistics=self._statistics,
            reports=self._reports,
        )
        self._guard = StepGuard(self._unsynchronized_by_id) if self._error_on_unsynchronized else None
        self._finalizer = weakref.finalize(self, _give_up, self._reducer, self._guard, self._reports)
        self._reports.follow(self._reducer)
        if self._precision.reduce is not None:
            self._reducer.wire_dtype = self._precision.reduce
            self._reducer.arrange()
        self._use_hook()
        self._use_plan(check=check_plan)
        self._measure()
        self._optimizer_hooks_seen = 0

    def _give_up_construction(self) -> None:
        self._reports.close()
        made = self.__dict__
        for close in (made.get("_finalizer"), *(made[name].close for name in ("_short_parameters", "_communicator") if name in made)):
            if close is not None:
                close()

    def close(self) -> None:
        """Takes the hooks off the module, which trains by itself from then on, and gives buckets and communicator back. Idempotent."""
        self._finalizer()
        self._short_parameters.close()
        self._communicator.close()

    # ---- forward ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. Collective while training with gradients, if buffers are synchronised."""
        with profiled("DistributedDataParallel.forward"):
            try:
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
                with active_module(self), self._short_parameters.used_by(self.module):
                    output = self.module(*inputs, **kwargs)
                return self._post_forward(output)
            except BaseException as error:
                self._reports.failed(error)
                self._reports.phase = OWN_CODE
                raise

    @untraced
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        local = is_local()
        if not local:
            self._reports.phase = FORWARD
        if torch.is_grad_enabled() and not local:
            self._forward_starts()
            self._reducer.prepare_forward()
            self._adopt_optimizer_hooks()
        if not local:
            syncs_buffers = self._syncs_buffers() and not self._syncs_buffers_after_forward()
            source = self._go_on(syncs_buffers)
            if syncs_buffers:
                self._sync_buffers(source)
        if self._placement.input_device is not None:
            inputs, kwargs = tree_map(self._move, (inputs, kwargs))
        inputs, kwargs = self._short_parameters.cast_inputs((inputs, kwargs))
        return inputs, kwargs

    @untraced
    def _post_forward(self, output: Any) -> Any:
        local = is_local()
        if not local:
            self._reports.phase = OWN_CODE
        if not torch.is_grad_enabled() or is_transformed():
            return output
        if not local:
            if self._syncs_buffers_after_forward() and self._syncs_buffers():
                self._sync_buffers(0)
            synchronizes = self.require_backward_grad_sync
            if self.require_forward_param_sync is not synchronizes and self.module.training:  # to set it costs a module 10 us
                self.require_forward_param_sync = synchronizes
        self._reducer.watch.watch(find_tensors(output), self.require_backward_grad_sync)
        return output

    def _move(self, value: Any) -> Any:
        return value.to(self._placement.input_device, non_blocking=True) if isinstance(value, Tensor) else value

    def _adopt_optimizer_hooks(self) -> None:
        count = count_optimizer_hooks()
        if count != self._optimizer_hooks_seen:
            self._optimizer_hooks_seen = count
            self._reducer.after_average = take_over_optimizer_hooks(self._reducer.parameters.parameters)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Gradients of forwards run inside accumulate on this rank alone, until the next backward that synchronises.

        Args:
            enabled: False makes it do nothing, for `with ddp.no_sync(not last_micro_batch):`.
        """
        check_flag("enabled", enabled)
        former = self.require_backward_grad_sync
        self.require_backward_grad_sync = former and not enabled
        try:
            yield
        finally:
            self.require_backward_grad_sync = former

    # ---- state ------------------------------------------------------------------------------------------------------

    def _describe_options(self) -> dict[str, object]:
        options = self._options
        return {
            "bucket_cap_mb": AUTO if self._tunes else options.caps.bytes,
            "plan": self._describe_plan(),
            "transport_options": self._transport_options,
            "gradient_as_bucket_view": options.gradient_as_bucket_view,
            "skip_all_reduce_unused_params": options.skip_unused_buckets,
            "static_graph": options.static_graph,
            "nonfinite": options.nonfinite,
            "forward_sync_buffers": self.forward_sync_buffers,
            "delay_all_reduce_named_params": self._delayed,
            "mixed_precision": self._precision,
        }

    def _broadcast_state(self, source: int = 0, *, with_buffers: bool = True) -> None:
        parameters = [p.detach() for _, p in named_parameters(self.module, self.parameters_to_ignore)]
        buffers = list(named_buffers(self.module, self.parameters_to_ignore).values()) if with_buffers else []
        broadcast_tensors(self._communicator, parameters + buffers, source, "parameters and buffers")

    def will_sync_module_buffers(self) -> bool:
        """Whether the next training forward synchronises buffers."""
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self.modules_buffers)

    def _syncs_buffers(self) -> bool:
        wanted = self.require_forward_param_sync and self.forward_sync_buffers
        return bool(wanted and self.module.training and torch.is_grad_enabled() and self._module_buffers.named())

    def _sync_buffers(self, source: int) -> None:
        if self._run_buffer_hook(self._module_buffers):
            return
        try:
            self._module_buffers.broadcast(self._communicator, source)
        except RankMismatchError as error:
            self._reducer.fail_at_end(error)
        except CommunicationError as error:
            self._reports.explain(error, "synchronising the module's buffers")
            raise


def _give_up(reducer: Reducer, guard: StepGuard | None, reports: Reporter) -> None:
    reports.close()
    reducer.close()
    if guard is not None:
        guard.close()


TorchDDP.register(DistributedDataParallel)
