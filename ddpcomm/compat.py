"""Names of torch's DistributedDataParallel that frameworks and torch's own tests use, beside the documented ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddpcomm.arguments import Placement
from ddpcomm.comm.base import Communicator
from ddpcomm.comm.process_group import is_member
from ddpcomm.comm.torch_ddp import ProcessGroup, active_ddp
from ddpcomm.config import ReducerOptions
from ddpcomm.errors import ConfigurationError, DDPCommError
from ddpcomm.hook_registration import HookRegistration
from ddpcomm.layout import BYTES_PER_MB, DEFAULT_BUCKET_MB
from ddpcomm.module_state import MOST_BYTES, broadcast_tensors
from ddpcomm.named_tensors import named_buffers, named_parameters
from ddpcomm.parameters import ParameterSet
from ddpcomm.reports import Reporter
from ddpcomm.torch_reducer import TorchLogger, TorchReducer, logging_data
from ddpcomm.transport_choice import TransportChoice


class TorchNames(HookRegistration, TransportChoice):
    """Base of DistributedDataParallel, which has the attributes named here."""

    module: nn.Module
    process_group: ProcessGroup
    dim: int
    static_graph: bool
    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    _placement: Placement
    _options: ReducerOptions
    _bucket_cap_mb_list: Sequence[float] | None
    _transport: str
    _reports: Reporter
    _communicator: Communicator

    # ---- attributes -------------------------------------------------------------------------------------------------

    @property
    def reducer(self) -> TorchReducer:
        """The reducer, by torch's names."""
        return TorchReducer(self._reducer)

    @property
    def logger(self) -> TorchLogger:
        """The record of this model, by torch's names."""
        return TorchLogger(self)

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return self._placement.device

    @property
    def device_type(self) -> str:
        """The type of `device`."""
        return self._placement.device.type

    @property
    def device_ids(self) -> list[int] | None:
        """The one GPU that inputs are moved to, or None."""
        return self._placement.device_ids

    @property
    def output_device(self) -> int | None:
        """Where outputs are: that GPU, or None."""
        return self._placement.output_device

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on several devices."""
        return len({p.device for p in self._module_parameters}) > 1

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's former name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of a bucket in bytes; torch.compile cuts graphs at it."""
        return max(self._options.caps.bytes)

    @property
    def broadcast_bucket_size(self) -> int:
        """The size in bytes of the pieces in which parameters and buffers are broadcast."""
        return MOST_BYTES

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """`bucket_cap_mb_list`, in bytes."""
        return [int(cap * BYTES_PER_MB) for cap in self._bucket_cap_mb_list or ()]

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the default bucket sizes are used."""
        return len(self._options.caps.bytes) > 1 and self.bucket_bytes_cap == DEFAULT_BUCKET_MB * BYTES_PER_MB

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronised, as they are now."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The same by name."""
        return named_buffers(self.module, self.parameters_to_ignore)

    @property
    def _module_parameters(self) -> list[Tensor]:
        return [p for _, p in named_parameters(self.module, self.parameters_to_ignore)]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._reducer.learned

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], Any]]:
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

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        managed = ParameterSet(self.module, self.parameters_to_ignore).managed
        return [m.parameter for m in managed], [m.sparse for m in managed]

    def _build_debug_param_to_name_mapping(self, parameters: list[Tensor]) -> dict[int, str]:
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
        self, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        broadcast_tensors(self._communicator, self.modules_buffers if bufs is None else bufs, authoritative_rank, "buffers")

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Declares the graph static; before the first backward, as in torch."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._reducer.backwards:
            raise self._logged(
                DDPCommError("_set_static_graph() should be called before training loop starts and after DistributedDataParallel is made")
            )
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        """Takes the reducer's hooks off the parameters: gradients stay this rank's own."""
        self._reducer.unhook()

    def _check_reducer_finalized(self) -> None:
        """Raises if the last backward left gradients unaveraged."""
        self.reducer._check_reducer_finalized()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Of how many iterations, after the first ten, `_get_ddp_logging_data` tells one."""
        if sample_rate < 1:
            raise self._logged(ConfigurationError("DDP runtime logging sample rate should be equal or greater than 1"))
        self._statistics.sample_every = sample_rate

    def _update_process_group(self, new_process_group: Any) -> None:
        """Synchronises over another group from now on. Its ranks must all call it, with no backward under way."""
        if is_member(new_process_group):
            self.process_group = new_process_group
            self._reports.connect(new_process_group)
            self._communicator = self._open_communicator({})
            self._reducer.use(self._communicator)
            self._plan_again()

    def _plan_again(self) -> None:
        """The ranks are others than before."""
        raise AttributeError("_plan_again")

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What torch records about a model, by torch's names."""
        return logging_data(self)

    @property
    def _distributed_rank(self) -> int:
        return self._communicator.rank

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Torch's `scatter_kwargs`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Torch's `gather`."""
        return gather(outputs, output_device, dim=self.dim)
