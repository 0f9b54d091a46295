"""Names of torch's DistributedDataParallel that frameworks and torch's own tests use, beside the documented ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddpcomm.comm.process_group import is_member
from ddpcomm.comm.torch_ddp import BufferCommHookLocation, active_ddp
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError, DDPCommError
from ddpcomm.layout import BYTES_PER_MB, DEFAULT_BUCKET_MB
from ddpcomm.module_state import named_buffers
from ddpcomm.parameters import ParameterSet
from ddpcomm.torch_reducer import TorchLogger, TorchReducer, logging_data

if TYPE_CHECKING:
    from ddpcomm.ddp import DistributedDataParallel


class TorchNames:
    """Mixed into DistributedDataParallel."""

    # ---- attributes -------------------------------------------------------------------------------------------------

    @property
    def reducer(self: DistributedDataParallel) -> TorchReducer:
        """The reducer, by torch's names."""
        return TorchReducer(self._reducer)

    @property
    def logger(self: DistributedDataParallel) -> TorchLogger:
        """The record of this model, by torch's names."""
        return TorchLogger(self)

    @property
    def device(self: DistributedDataParallel) -> torch.device:
        """Where the first parameter is."""
        return self._placement.device

    @property
    def device_type(self: DistributedDataParallel) -> str:
        """The type of `device`."""
        return self._placement.device.type

    @property
    def device_ids(self: DistributedDataParallel) -> list[int] | None:
        """The one GPU that inputs are moved to, or None."""
        return self._placement.device_ids

    @property
    def output_device(self: DistributedDataParallel) -> int | None:
        """Where outputs are: that GPU, or None."""
        return self._placement.output_device

    @property
    def is_multi_device_module(self: DistributedDataParallel) -> bool:
        """Whether the module's parameters are on several devices."""
        return len({p.device for p in self._module_parameters}) > 1

    @property
    def broadcast_buffers(self: DistributedDataParallel) -> bool:
        """Torch's former name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self: DistributedDataParallel, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def bucket_bytes_cap(self: DistributedDataParallel) -> int:
        """The size of a bucket in bytes; torch.compile cuts graphs at it."""
        return max(self._options.caps.bytes)

    @property
    def bucket_bytes_cap_list(self: DistributedDataParallel) -> list[int]:
        """`bucket_cap_mb_list`, in bytes."""
        return [int(cap * BYTES_PER_MB) for cap in self._bucket_cap_mb_list or ()]

    @property
    def bucket_bytes_cap_default(self: DistributedDataParallel) -> bool:
        """Whether the default bucket sizes are used."""
        return len(self._options.caps.bytes) > 1 and self.bucket_bytes_cap == DEFAULT_BUCKET_MB * BYTES_PER_MB

    @property
    def modules_buffers(self: DistributedDataParallel) -> list[Tensor]:
        """The buffers that are synchronised, as they are now."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self: DistributedDataParallel) -> dict[str, Tensor]:
        """The same by name."""
        return named_buffers(self.module, self.parameters_to_ignore)

    @property
    def _module_parameters(self: DistributedDataParallel) -> list[Tensor]:
        return [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    @property
    def _has_rebuilt_buckets(self: DistributedDataParallel) -> bool:
        return self._reducer.rebuilt

    @property
    def _comm_hooks(self: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
        hook = self._reducer.hook
        return [] if hook is None else [(hook.hook, hook.state)]

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        return active_ddp()

    # ---- the module's state -----------------------------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Names of parameters and buffers, as `named_parameters` and `named_buffers` give them, that a wrapper is to leave alone."""
        names = set(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of `module` that a wrapper looks after."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self: DistributedDataParallel) -> tuple[list[Tensor], list[bool]]:
        managed = ParameterSet(self.module, self.parameters_to_ignore).managed
        return [m.parameter for m in managed], [m.sparse for m in managed]

    def _build_debug_param_to_name_mapping(self: DistributedDataParallel, parameters: list[Tensor]) -> dict[int, str]:
        names = {id(m.parameter): m.name for m in ParameterSet(self.module, self.parameters_to_ignore).managed}
        known = {id(p) for p in parameters}
        for identity, name in names.items():
            if identity not in known:
                raise self._logged(ConfigurationError(f"Param with name {name} found in module parameters, but not DDP parameters."))
        mapping = {index: names[id(p)] for index, p in enumerate(parameters) if id(p) in names}
        if len(mapping) != len(known):
            raise self._logged(
                ConfigurationError(
                    f"Expected param to name mapping to cover all parameters, but got conflicting lengths: {len(known)} vs {len(mapping)}."
                )
            )
        return mapping

    def _assign_modules_buffers(self) -> None:
        """Buffers are looked up anew whenever they are needed."""

    def _default_broadcast_coalesced(
        self: DistributedDataParallel, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        self._broadcast(self.modules_buffers if bufs is None else bufs, authoritative_rank)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _set_static_graph(self: DistributedDataParallel) -> None:
        """Declares the graph static; before the first backward, as in torch."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._reducer.backwards:
            raise self._logged(
                DDPCommError("_set_static_graph() should be called before training loop starts and after DistributedDataParallel is made")
            )
        self.static_graph = True

    def _remove_autograd_hooks(self: DistributedDataParallel) -> None:
        """Takes the reducer's hooks off the parameters: gradients stay this rank's own."""
        self._reducer.unhook()

    def _check_reducer_finalized(self: DistributedDataParallel) -> None:
        """Raises if the last backward left gradients unaveraged."""
        self.reducer._check_reducer_finalized()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Every iteration is recorded here: it costs five readings of a clock."""
        if sample_rate < 1:
            raise ConfigurationError("DDP runtime logging sample rate should be equal or greater than 1")

    def _update_process_group(self: DistributedDataParallel, new_process_group: Any) -> None:
        """Synchronises over another group from now on. Its ranks must all call it, with no backward under way."""
        if is_member(new_process_group):
            self.process_group = new_process_group
            self._replace_communicator()

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        """Puts `hook` in the place of the all-reduce of each bucket. Once, before the first backward, on all ranks alike.

        Args:
            state: handed to the hook at every call.
            hook: `hook(state, bucket) -> torch.futures.Future`, by torch's contract; or a wire format of `ddpcomm.hooks`.

        Raises:
            ConfigurationTypeError: it can't be called.
            ConfigurationError: its annotations say that it is no such hook; or there is one already.
        """
        try:
            _check_hook(hook)
            self._set_hook(state, hook)
        except DDPCommError as error:
            raise self._logged(error) from None

    def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: Any) -> None:
        """Torch's built-in hooks: ALLREDUCE and FP16_COMPRESS."""
        self._set_builtin_hook(comm_hook_type)

    def _register_buffer_comm_hook(
        self: DistributedDataParallel, state: Any, hook: Callable[..., Any], comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """`hook(state, buffers_by_name)` synchronises buffers, in the broadcast's place, before or after each training forward.

        It may return futures, which are waited for at the end of backward.
        """
        if not callable(hook):
            raise ConfigurationTypeError("the buffer communication hook must be callable")
        self._buffer_hook = (state, hook, comm_hook_location)

    def _run_buffer_hook(self: DistributedDataParallel, buffers: dict[str, Tensor]) -> bool:
        if self._buffer_hook is None:
            return False
        state, hook, _ = self._buffer_hook
        futures = hook(state, buffers)
        if futures is not None:
            self._reducer.wait_for += [futures] if isinstance(futures, torch._C.Future) else list(futures)
        return True

    def _syncs_buffers_after_forward(self: DistributedDataParallel) -> bool:
        return self._buffer_hook is not None and self._buffer_hook[2] == BufferCommHookLocation.POST_FORWARD

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self: DistributedDataParallel) -> dict[str, Any]:
        """What torch records about a model, by torch's names."""
        return logging_data(self)

    def _logged(self: DistributedDataParallel, error: DDPCommError) -> DDPCommError:
        self._statistics.error = f"{type(error).__name__}: {error}"
        return error

    @property
    def _distributed_rank(self: DistributedDataParallel) -> int:
        return self._communicator.rank

    def scatter(self: DistributedDataParallel, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Torch's `scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self: DistributedDataParallel, outputs: Any, output_device: Any) -> Any:
        """Torch's `gather`."""
        return gather(outputs, output_device, dim=self.dim)


def _check_hook(hook: Callable[..., Any]) -> None:
    """Torch's own checks of a hook's annotations."""
    if hasattr(hook, "dtype") and not callable(hook):
        return
    if not callable(hook):
        raise ConfigurationTypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if (
        bucket is not None
        and bucket.annotation not in (inspect.Parameter.empty, "dist.GradBucket")
        and "GradBucket" not in str(bucket.annotation)
    ):
        raise ConfigurationError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty and "Future" not in str(returned):
        raise ConfigurationError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
