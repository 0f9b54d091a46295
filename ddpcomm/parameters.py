"""The parameters that a reducer looks after, and a cheap look whether they are still the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddpcomm.layout import ParameterSize
from ddpcomm.named_tensors import TensorWatch, named_parameters

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


Identity = tuple[int, torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """What autograd casts the parameter's gradient to: `Tensor.grad_dtype`, where torch has it and it names one, or the parameter's own."""
    named = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return named if isinstance(named, torch.dtype) else parameter.dtype


def _identity(parameter: Tensor) -> Identity:
    return id(parameter), gradient_dtype(parameter), parameter.device, parameter.shape, parameter.stride()


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter as it was when it was laid out. Two of them are equal when gradients of the one fit the other's place."""

    name: str = field(compare=False)
    parameter: Tensor = field(compare=False)
    sparse: bool = field(compare=False, default=False)
    identity: Identity = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", _identity(self.parameter))

    @property
    def unchanged(self) -> bool:
        """Whether gradients of the parameter still have the dtype, device, shape and strides that it was laid out with."""
        return self.identity == _identity(self.parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its gradients that it was laid out with."""
        return self.identity[1]

    @property
    def shape(self) -> torch.Size:
        """The shape that it was laid out with."""
        return self.identity[3]

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides that it was laid out with."""
        return self.identity[4]

    @property
    def bucket_dtype(self) -> torch.dtype:
        """The real dtype that its gradient is reduced in: a complex one is reduced as pairs of real elements."""
        return _REAL.get(self.dtype, self.dtype)

    def size(self, wire_dtype: torch.dtype | None = None) -> ParameterSize:
        """What the layout needs to know.

        Args:
            wire_dtype: of the bucket, where it isn't the gradient's own. A complex one keeps its own. It also keeps to buckets of its own:
                in a packed one, a pair might not start where torch can see a complex number.
        """
        p, is_complex = self.parameter, self.dtype.is_complex
        dtype = self.bucket_dtype if wire_dtype is None or is_complex else wire_dtype
        return ParameterSize(p.numel() * (2 if is_complex else 1), dtype.itemsize, (p.device, dtype, is_complex))


class ParameterSet:
    """The trainable parameters of a module, in registration order, each once (`named_parameters`).

    Args:
        module: whose parameters.
        ignored: names of parameters to leave alone.
        sparse: names of parameters whose gradients were seen to be sparse, besides those of `Embedding(sparse=True)`.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = (), sparse: Collection[str] = ()) -> None:
        embeddings = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        declared = {id(m.weight) for m in embeddings if isinstance(m.weight, Tensor)}
        self.managed: list[ManagedParameter] = []
        self._frozen: list[Tensor] = []
        for name, parameter in named_parameters(module, ignored):
            if parameter.requires_grad:
                self.managed.append(ManagedParameter(name, parameter, id(parameter) in declared or name in sparse))
            else:
                self._frozen.append(parameter)
        self.names = [m.name for m in self.managed]
        self.parameters = [m.parameter for m in self.managed]
        self._containers = TensorWatch(module, "_parameters")

    def replaced_or_unfrozen(self) -> bool:
        """Whether a parameter or submodule came, went or was exchanged, or a frozen parameter was unfrozen.

        Costs 5 ns a parameter and submodule, and 0.1 us a frozen parameter. A parameter that was frozen or cast is noticed elsewhere: where
        its gradient is missing or of another dtype.
        """
        return self._containers.changed() or any(p.requires_grad for p in self._frozen)

    def indices(self, names: Collection[str]) -> frozenset[int]:
        """Those of the parameters with these names."""
        return frozenset(index for index, name in enumerate(self.names) if name in names)

    def launch_order(self, ready_order: Sequence[str], delayed: Collection[str]) -> list[int]:
        """As they become ready; those that never did in reverse order of registration; delayed ones last of all."""
        index_of = {name: index for index, name in enumerate(self.names)}
        known = [index_of[name] for name in ready_order if name in index_of]
        unknown = set(index_of.values()).difference(known)
        return sorted(known + sorted(unknown, reverse=True), key=lambda index: self.names[index] in delayed)

    def newcomers(self, former: Iterable[ManagedParameter]) -> list[int]:
        """Indices of the parameters here that had no place in `former`."""
        known = {(m.identity, m.sparse) for m in former}
        return [index for index, m in enumerate(self.managed) if (m.identity, m.sparse) not in known]
