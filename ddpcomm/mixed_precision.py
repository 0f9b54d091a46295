"""Mixed precision inside the wrapper: forward and backward in a short dtype, over parameters that stay in full precision.

During the module's forward its parameters are replaced by casts of them. The casts are part of the graph, so backward ends in the
parameters themselves: their gradients arrive, accumulate and are stepped on in full precision, and nobody outside of the forward ever meets
another dtype. What goes over the wire is cast as it is flattened. (Torch exchanges the parameters' data until the end of backward.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from ddpcomm.errors import ConfigurationError, ConfigurationTypeError
from ddpcomm.named_tensors import named_buffers, named_parameters

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Precision:
    """torch's `_MixedPrecision`, checked.

    Args:
        parameters: dtype of parameters and inputs in forward and backward; None means their own.
        reduce: dtype in which gradients travel and are summed; None means the gradients' own.
        buffers: dtype of floating-point buffers, from construction on; None means their own.
    """

    parameters: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffers: torch.dtype | None = None

    @classmethod
    def of(cls, config: Any) -> Precision:
        """Reads an object with `param_dtype`, `reduce_dtype` and `buffer_dtype`; None stands for no mixed precision.

        Raises:
            ConfigurationTypeError: it has not got these.
            ConfigurationError: one of them is none of the floating-point dtypes of 16, 32 and 64 bits.
        """
        if config is None:
            return cls()
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(config, name) for name in names):
            raise ConfigurationTypeError(f"mixed_precision must have the attributes {', '.join(names)}, got {type(config).__name__}")
        dtypes = {name: getattr(config, name) for name in names}
        for name, dtype in dtypes.items():
            if dtype is not None and dtype not in _FLOATS:
                raise ConfigurationError(f"mixed_precision.{name} must be one of {', '.join(map(str, _FLOATS))}, got {dtype}")
        param, reduce, buffer = dtypes.values()
        return cls(param, reduce or param, buffer)


class ShortParameters:
    """Has a module run on casts of its parameters.

    Args:
        module: whose; hooks are put on all its submodules, for the forwards that checkpoints run again in backward.
        dtype: to run in; None means that it runs as it is.
        ignored: names of parameters to leave alone.

    Raises:
        ConfigurationError: TorchScript holds parameters of the module.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
        self._module = module
        self._dtype = dtype
        self._ignored = frozenset(ignored)
        self._recomputing: list[ExitStack] = []
        self._handles: list[Any] = []
        for name, submodule in module.named_modules() if dtype is not None else ():
            if isinstance(submodule, torch.jit.ScriptModule):
                raise ConfigurationError(
                    f"mixed_precision can't cast the parameters of a TorchScript module: {name or 'the module itself'}"
                )
        for submodule in module.modules() if dtype is not None else ():
            self._handles.append(submodule.register_forward_pre_hook(self._before_recomputation))
            self._handles.append(submodule.register_forward_hook(self._after_recomputation, always_call=True))

    def used_by(self, part: nn.Module) -> AbstractContextManager[None]:
        """While it lasts, `part` and all in it hold casts. A parameter that is shared is cast once."""
        return nullcontext() if self._dtype is None else self._exchanged(part, self._dtype)

    @contextmanager
    def _exchanged(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        own = {id(parameter) for _, parameter in named_parameters(self._module, self._ignored)}
        # What a forward around this one has put in place of a parameter is no nn.Parameter.
        parameters = [p for p in part.parameters() if isinstance(p, nn.Parameter) and p.is_floating_point() and id(p) in own]
        casts = {id(parameter): parameter.to(dtype) for parameter in parameters}
        try:
            _replace(part, casts)
            yield
        finally:
            _replace(part, {id(casts[id(parameter)]): parameter for parameter in parameters})

    def cast_inputs(self, inputs: Any) -> Any:
        """The same inputs, floating-point tensors in the module's dtype: in containers, dataclasses and packed sequences."""
        return inputs if self._dtype is None else tree_map(self._cast, inputs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        if isinstance(value, PackedSequence):
            return value._replace(data=self._cast(value.data))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{name: self.cast_inputs(getattr(value, name)) for name in fields})
        return value

    def _before_recomputation(self, part: nn.Module, _: Any) -> None:
        if _in_backward():
            stack = ExitStack()
            stack.enter_context(self.used_by(part))
            self._recomputing.append(stack)

    def _after_recomputation(self, *_: Any) -> None:
        if _in_backward() and self._recomputing:
            self._recomputing.pop().close()

    def close(self) -> None:
        """Takes the hooks off the module. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _replace(part: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Puts tensors in place of others, by their ids, wherever modules keep them: as parameters, as other attributes, and in lists and
    dictionaries, as RNNs do, which make new lists in their forward."""
    for module in part.modules():
        attributes = vars(module)
        for container in [attributes, *(value for value in attributes.values() if isinstance(value, list | dict))]:
            for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
                if isinstance(value, Tensor) and id(value) in replacements:
                    container[key] = replacements[id(value)]


def _in_backward() -> bool:
    # While torch.compile traces a forward there is no backward; asking would break its graph.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Casts the floating-point buffers for good, as torch does; None leaves them alone."""
    for buffer in named_buffers(module, ignored).values():
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
