"""One rank of test_network_namespaces.py, started by `ip netns exec`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpcomm.comm.factory import create_communicator


def main(store: str, rank: int, world_size: int, result: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=limit)
    with create_communicator(timeout=limit) as communicator:
        sums = []
        for numel in (5, 100_000, 1_000_000):
            for tensor in (communicator.empty(numel, torch.float32), torch.empty(numel)):
                tensor.fill_(rank + 1)
                communicator.all_reduce(tensor).wait()
                sums.append([tensor.min().item(), tensor.max().item()])
        communicator.barrier().wait()
        with open(result, "w") as file:
            json.dump({"transport": communicator.transport, "hosts": getattr(communicator, "hosts", None), "sums": sums}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
