"""What csrc/bindings offers. One section a file there."""

from collections.abc import Sequence

import torch

# ---- isa ----

def instruction_sets() -> list[str]: ...

# ---- tensor ----

class TensorReader:
    def __init__(self, tensor_type: type, dtypes: dict[torch.dtype, tuple[int, int]], use_dlpack: bool = True) -> None: ...
    @property
    def uses_dlpack(self) -> bool: ...
    def read(self, tensor: torch.Tensor) -> tuple[int, int, int, int, bool, bool]: ...

# ---- flatten ----

class FlattenPlan:
    def __init__(
        self,
        reader: TensorReader,
        numels: Sequence[int],
        offsets: Sequence[int],
        total_numel: int,
        dtype: tuple[int, int],
        instruction_set: str = "",
    ) -> None: ...
    def flatten(self, tensors: Sequence[torch.Tensor | None], out: torch.Tensor, scale: float, threads: int) -> None: ...
    def unflatten(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor | None], scale: float, threads: int) -> None: ...
