"""Run by test_nccl_library.py in a process of its own, which can load but one libnccl: `python -m tests.comm.nccl_library_calls LIBRARY`.

Prints, as JSON, what `Nccl4pyLibrary` made of the libnccl at that path.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch

from ddpcomm.comm.nccl_library import IN_PROGRESS, SUCCESS, Nccl4pyLibrary
from ddpcomm.errors import DDPCommError
from tests.comm.recorder import RecordedStream


def every_call(library: Nccl4pyLibrary) -> dict[str, Any]:
    """Makes each call once, with telling arguments."""
    stream = RecordedStream("comm", 0x57)
    handle = library.start(
        8,
        3,
        library.unique_id(),
        {"blocking": 0, "max_ctas": 4, "traffic_class": 9, "net_name": "IB", "comm_name": "x", "launch_order_implicit": 1},
    )
    states = [library.state(handle), library.state(handle)]
    assert states == [IN_PROGRESS, SUCCESS]
    operator = library.create_scaled_sum(handle, 0.25, torch.float32)
    library.create_scaled_sum(handle, 0.125, torch.float64)
    library.all_reduce(handle, torch.zeros(5, dtype=torch.bfloat16), operator, stream)
    library.broadcast(handle, torch.zeros(7, dtype=torch.uint8), 2, stream)
    parts = torch.tensor([1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    library.all_gather(handle, parts[1], parts[0], stream)
    library.reduce_scatter(handle, parts[0], parts[1], 2, stream)
    pointer = library.allocate(4096)
    registration = library.register(handle, pointer, 4096)
    if registration:
        library.deregister(handle, registration)
    found: dict[str, Any] = {"registered": bool(registration)}
    if library.has("ncclCommWindowRegister"):
        window = library.register_window(handle, pointer, 4096)
        found["window"] = bool(window)
        if window:
            library.deregister_window(handle, window)
        child = library.shrink(handle, [1, 5], {"max_ctas": 2}, abort=True)
        library.abort(child)
        library.revoke(handle)
        found["memory"] = library.memory_bytes(handle)
    library.free(pointer)
    library.destroy_operator(handle, operator)
    try:
        library.finalize(handle)
    except DDPCommError as error:
        found["finalize"] = f"{type(error).__name__}: {error}"
    library.destroy(handle)
    return found


def main(path: str, what: str) -> None:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    try:
        library = Nccl4pyLibrary()
    except DDPCommError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    names = (
        "ncclMemAlloc",
        "ncclCommRegister",
        "ncclCommWindowRegister",
        "ncclCommShrink",
        "ncclCommRevoke",
        "ncclCommMemStats",
        "ncclNone",
    )
    found: dict[str, Any] = {"version": library.version, "path": library.path, "has": [name for name in names if library.has(name)]}
    found["identifiers"] = [len(library.unique_id()), library.unique_id() != library.unique_id()]
    if what == "every_call":
        found |= every_call(library)
    elif what == "start":
        try:
            library.start(1, 0, library.unique_id(), {"blocking": 0, "max_ctas": 4})
        except DDPCommError as error:
            found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
