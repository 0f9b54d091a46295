"""What csrc/bindings offers. One section a file there."""

from collections.abc import Sequence
from enum import Enum

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
    def flatten(
        self, tensors: Sequence[torch.Tensor | None], out: torch.Tensor, scale: float, threads: int, accumulate: bool = False
    ) -> None: ...
    def unflatten(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor | None], scale: float, threads: int) -> None: ...
    def unflatten_with_norm(
        self, flat: torch.Tensor, tensors: Sequence[torch.Tensor | None], scale: float, threads: int
    ) -> tuple[float, int]: ...
    def norm(self, flat: torch.Tensor, threads: int) -> tuple[float, int]: ...

# ---- quantise ----

class QuantisePlan:
    def __init__(
        self,
        reader: TensorReader,
        numels: Sequence[int],
        offsets: Sequence[int],
        total_numel: int,
        code: str,
        instruction_set: str = "",
    ) -> None: ...
    def quantise(
        self,
        tensors: Sequence[torch.Tensor | None],
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor | None,
        scale: float,
        threads: int,
    ) -> None: ...
    def dequantise(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        scale: float,
        accumulate: bool,
        threads: int,
    ) -> None: ...


# ---- gradients ----

class GradientTable:
    def __init__(self, reader: TensorReader, parameters: list[torch.Tensor], views: list[torch.Tensor]) -> None: ...
    def gather(self) -> tuple[list[torch.Tensor | None], list[int]]: ...
    def changed(self, gradients: list[torch.Tensor | None]) -> list[int]: ...
    def assign_views(self, gradients: list[torch.Tensor | None], flags: Sequence[bool]) -> None: ...

# ---- shared_memory ----

class SharedMemorySegment:
    def __init__(self, file: int, capacity_bytes: int) -> None: ...

class SharedMemoryArena:
    def __init__(self, capacity_bytes: int) -> None: ...
    @property
    def file(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    def allocate(self, bytes: int) -> SharedMemoryAllocation: ...

class SharedMemoryAllocation:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class SharedMemoryFailure(Enum):
    NONE = ...
    MISMATCH = ...
    TIMEOUT = ...
    PEER_LOST = ...
    PEER_CLOSED = ...
    CLOSED = ...
    OTHER = ...

class SharedMemoryChannel:
    def __init__(
        self,
        arena: SharedMemoryArena,
        rank: int,
        segments: Sequence[SharedMemorySegment | None],
        names: Sequence[int],
        watched: Sequence[Sequence[int]],
        channel: int,
        piece_bytes: int,
        small_bytes: int,
        stream_bytes: int,
        spin_seconds: float,
        isa: str,
    ) -> None: ...
    def start(
        self, kind: int, op: int, dtype_code: int, dtype_bits: int, source: int, numel: int, tag: int, input: int, output: int, /
    ) -> int: ...
    def wait(self, number: int, seconds: float, /) -> bool: ...
    def wait_for_room(self, seconds: float, /) -> bool: ...
    def progress(self) -> None: ...
    def is_finished(self, number: int, /) -> bool: ...
    @property
    def failed(self) -> bool: ...
    def failure(self) -> tuple[SharedMemoryFailure, int, str]: ...
    def abort(self, kind: SharedMemoryFailure, ranks: int, message: str, /) -> None: ...
    def close(self) -> None: ...

def shared_memory_reduce(
    isa: str,
    op: int,
    dtype_code: int,
    dtype_bits: int,
    sources: Sequence[int],
    targets: Sequence[int],
    count: int,
    scale: float,
    stream: bool,
    /,
) -> None: ...
