"""Registration of communication hooks, by torch's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpcomm.comm.torch_ddp import BufferCommHookLocation, BuiltinCommHookType
from ddpcomm.comm_hook import CommHook
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError, DDPCommError
from ddpcomm.hooks import Quantized, WireFormat, fp16
from ddpcomm.module_state import ModuleBuffers
from ddpcomm.reducer import Reducer
from ddpcomm.statistics import Statistics

_ONLY_ONCE = "register_comm_hook or register_builtin_comm_hook can only be called once."


class HookRegistration(nn.Module):
    """Base of DistributedDataParallel, which has the attributes named here."""

    _reducer: Reducer
    _statistics: Statistics
    _hook_name: str
    _comm_hook: tuple[Any, Callable[..., Any] | WireFormat | Quantized] | None
    _buffer_hook: tuple[Any, Callable[..., Any], Any] | None

    def register_comm_hook(self, state: object, hook: Callable[..., Any] | WireFormat | Quantized) -> None:
        """Puts `hook` in the place of the all-reduce of each bucket. Once, before the first backward, on all ranks alike.

        Args:
            state: handed to the hook at every call.
            hook: `hook(state, bucket) -> torch.futures.Future`, by torch's contract; or one of `ddpcomm.hooks`.

        Raises:
            ConfigurationTypeError: it can't be called.
            ConfigurationError: its annotations say that it is no such hook; or there is one already.
        """
        try:
            if not isinstance(hook, (WireFormat, Quantized)):
                _check_hook(hook)
            self._set_hook(state, hook)
        except DDPCommError as error:
            raise self._logged(error) from None

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Torch's built-in hooks: ALLREDUCE and FP16_COMPRESS."""
        if comm_hook_type == BuiltinCommHookType.FP16_COMPRESS:
            self._set_hook(None, fp16)
        elif self._hook_name:
            raise ConfigurationError(_ONLY_ONCE)
        self._hook_name = str(comm_hook_type)

    def _set_hook(self, state: object, hook: Callable[..., Any] | WireFormat | Quantized) -> None:
        if self._hook_name:
            raise ConfigurationError(_ONLY_ONCE)
        self._comm_hook = (state, hook)
        self._hook_name = self._use_hook()

    def _use_hook(self) -> str:
        """Gives the reducer the hook that is registered, if any. Returns its name."""
        if self._comm_hook is None:
            return ""
        state, hook = self._comm_hook
        if isinstance(hook, WireFormat):
            self._reducer.wire_dtype = hook.dtype
            name = hook.name
        else:
            bound = hook.bind(lambda: self._reducer.communicator) if isinstance(hook, Quantized) else hook
            if self._reducer.tuner is not None:
                self._reducer.stop_tuning()  # a hook may keep something for each bucket
            self._reducer.hook = CommHook(state, bound)
            name = self._reducer.hook.name
        self._reducer.arrange()
        return name

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """`hook(state, buffers_by_name)` synchronises buffers, in the broadcast's place, before or after each training forward.

        It may return futures, which are waited for at the end of backward.
        """
        if not callable(hook):
            raise ConfigurationTypeError("the buffer communication hook must be callable")
        self._buffer_hook = (state, hook, comm_hook_location)

    def _run_buffer_hook(self, buffers: ModuleBuffers) -> bool:
        if self._buffer_hook is None:
            return False
        state, hook, _ = self._buffer_hook
        futures = hook(state, dict(buffers.named()))
        if futures is not None:
            self._reducer.wait_for += [futures] if isinstance(futures, torch._C.Future) else list(futures)
        return True

    def _syncs_buffers_after_forward(self) -> bool:
        return self._buffer_hook is not None and self._buffer_hook[2] == BufferCommHookLocation.POST_FORWARD

    def _logged(self, error: DDPCommError) -> DDPCommError:
        self._statistics.error = f"{type(error).__name__}: {error}"
        return error


def _check_hook(hook: Callable[..., Any]) -> None:
    """Torch's own checks of a hook's annotations."""
    if not callable(hook):
        raise ConfigurationTypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a builtin that tells none
        return
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation is not inspect.Parameter.empty and "GradBucket" not in str(bucket.annotation):
        raise ConfigurationError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty and "Future" not in str(returned):
        raise ConfigurationError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
