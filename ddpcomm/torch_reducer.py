"""`ddp.reducer` and `ddp.logger` by torch's names, for the frameworks that call them (Accelerate, Lightning) and for torch's own tests."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpcomm.comm.torch_ddp import environment_facts
from ddpcomm.errors import SynchronizationError
from ddpcomm.reducer import Reducer


class TorchReducer:
    """Torch's names for what a reducer does.

    Args:
        reducer: the reducer itself.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.proxy(reducer)

    def prepare_for_forward(self) -> None:
        """Ends what an interrupted backward left open."""
        self._reducer.prepare_forward()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The next backward synchronises, whatever the forward before it asked for. `outputs`: where it is going to begin."""
        self._reducer.request_synchronization(outputs)

    def _rebuild_buckets(self) -> bool:
        """Buckets are laid out again at the end of the backward that showed their order: never here."""
        return False

    def _get_local_used_map(self) -> Tensor:
        """On how many ranks each parameter was used in the last backward, int32, in registration order."""
        reducer: Reducer = self._reducer
        return reducer.record.used_counts(len(reducer.parameters.managed), reducer.divisor).to(reducer.communicator.device)

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far used the same parameters."""
        return bool(self._reducer.record.graph_is_static)

    def _check_reducer_finalized(self) -> None:
        """Raises if the last backward left gradients unaveraged.

        Raises:
            SynchronizationError: it was interrupted, or the hooks are off.
        """
        if not self._reducer.record.complete:
            raise SynchronizationError(
                "Expected to have finished reduction in the prior iteration before starting a new one: "
                "the last backward did not end with averaged gradients on this rank"
            )

    def _remove_autograd_hooks(self) -> None:
        """Takes the hooks off the parameters: gradients stay this rank's own."""
        self._reducer.unhook()

    def _delay_all_reduce(self) -> None:
        """Nothing is left over: every backward ends with the averages in place."""

    def _set_static_graph(self) -> None:
        """Nothing depends on it."""

    def _push_all_rebuilt_params(self) -> None:
        """Nothing is left to push."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Of how many iterations the logging data tell one."""
        self._reducer.statistics.sample_every = sample_rate


class TorchLogger:
    """Torch's names for what is recorded about a model."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = weakref.proxy(ddp)

    def set_error_and_log(self, error: str) -> None:
        """Remembers an error for `_get_ddp_logging_data`."""
        self._ddp._statistics.error = error

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self._ddp)


_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def logging_data(ddp: Any) -> dict[str, Any]:
    """What torch's `_get_ddp_logging_data` tells, under the same names; times in nanoseconds of a host clock."""
    reducer: Reducer = ddp._reducer
    statistics = ddp._statistics
    parameters = reducer.parameters.parameters
    sizes = [[p.numel() * p.element_size() for p in bucket.parameters] for bucket in reducer.arrangement.buckets if bucket.parameters]
    bucket_sizes = ", ".join(str(sum(bucket)) for bucket in sizes)
    indices = [" ".join(str(slot.parameter) for slot in bucket.slots) for bucket in reducer.arrangement.buckets if bucket.slots]
    device_ids = ddp.device_ids or []
    data: dict[str, Any] = {
        "world_size": ddp._communicator.world_size,
        "rank": ddp._communicator.rank,
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, device_ids)),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp.module.modules())),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "iteration": statistics.sampled_iteration,
        "dtypes": ", ".join(dict.fromkeys(_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters)),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "num_parameter_tensors": len(parameters),
        "bucket_sizes": ", ".join(map(str, statistics.initial_bucket_bytes)),
        "unused_parameter_size": statistics.unused_parameter_bytes,
        "has_rebuilt_buckets": int(reducer.learned),
        "num_buckets_reduced": statistics.buckets_reduced,
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, statistics.ready_order)),
        "can_set_static_graph": reducer.record.graph_is_static,
        "has_error": int(bool(statistics.error)),
        "error": statistics.error,
        "forward_compute_time": statistics.last["forward"],
        "backward_compute_time": statistics.last["backward"],
        "backward_comm_time": statistics.last["communication"],
        "backward_compute_comm_overlap_time": statistics.last["overlap"],
        "avg_forward_compute_time": statistics.average_ns("forward"),
        "avg_backward_compute_time": statistics.average_ns("backward"),
        "avg_backward_comm_time": statistics.average_ns("communication"),
        "avg_backward_compute_comm_overlap_time": statistics.average_ns("overlap"),
        "forward_compute_time_start": statistics.forward_start,
        "backward_compute_time_start": statistics.backward_start,
        "backward_comm_time_start": statistics.communication_start,
        "backward_compute_time_end": statistics.backward_end,
        "backward_comm_time_end": statistics.communication_end,
    }
    if reducer.learned:
        data["rebuilt_bucket_sizes"] = bucket_sizes
        data["rebuilt_per_bucket_param_indices"] = ", ".join(indices)
    name = reducer.hook.name if reducer.hook is not None else ddp._hook_name
    if name:
        data["comm_hook"] = name
    return {**data, **environment_facts(ddp.process_group)}
