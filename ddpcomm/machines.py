"""What a forecast must know of a machine: its hosts, their links, what one GPU can do. Some well-known ones, by their makers' figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ddpcomm.argument_checks import check_integer, check_number
from ddpcomm.errors import ConfigurationError

# The bandwidths that NCCL itself reckons with (2.30.7, src/graph/topo.h): of one NVLink, one way, and of 100 Gbit/s of network.
NVLINK_BYTES_PER_SECOND = {70: 20.0e9, 80: 20.0e9, 90: 20.6e9, 100: 40.1e9}
NIC_BYTES_PER_SECOND_PER_100_GBIT = 12.0e9


@dataclass(frozen=True)
class Machine:
    """Equal hosts of equal GPUs.

    Args:
        name: for reports.
        ranks_per_host: GPUs a host.
        link: what connects them: "nvlink" or "pci".
        link_bytes_per_second: of one GPU to its neighbours, one way, all its links together.
        network_bytes_per_second: of one host, one way, all its cards together.
        compute_capability: such as 80 for sm_80.
        flops_per_second: peak of one GPU in the precision that matrices are multiplied in.
        memory_bytes_per_second: of one GPU.
        multiprocessors: of one GPU.
        utilisation: share of the peak that a model's own work reaches, for models whose time was not measured.
        imbalance: standard deviation over GPUs of the time for the same work, relative; a step takes as long as the slowest needs.

    Raises:
        ConfigurationError: a figure that is out of its range.
    """

    name: str
    ranks_per_host: int
    link: str
    link_bytes_per_second: float
    network_bytes_per_second: float
    compute_capability: int = 80
    flops_per_second: float = 0.0
    memory_bytes_per_second: float = 0.0
    multiprocessors: int = 0
    utilisation: float = 0.4
    imbalance: float = 0.0

    def __post_init__(self) -> None:
        if self.link not in ("nvlink", "pci"):
            raise ConfigurationError(f"link must be nvlink or pci, got {self.link!r}")
        for name in ("ranks_per_host", "compute_capability", "multiprocessors"):
            check_integer(f"{name} of machine {self.name!r}", getattr(self, name), least=0)
        for name in ("link_bytes_per_second", "network_bytes_per_second", "flops_per_second", "memory_bytes_per_second", "utilisation"):
            check_number(f"{name} of machine {self.name!r}", getattr(self, name), least=0)
        check_number(f"imbalance of machine {self.name!r}", self.imbalance)
        for name in ("ranks_per_host", "link_bytes_per_second", "network_bytes_per_second", "utilisation"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} of machine {self.name!r} must be more than 0, got {getattr(self, name)}")
        if not 0 <= self.imbalance < 1:
            raise ConfigurationError(f"imbalance of machine {self.name!r} must be from 0 to below 1, got {self.imbalance}")

    def hosts(self, ranks: int) -> int:
        """How many hosts `ranks` GPUs take."""
        return -(-ranks // self.ranks_per_host)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Machine:
        """
        Raises:
            ConfigurationError: a name that a machine doesn't have, one that is missing, or a value out of its range.
        """
        if not isinstance(content, Mapping):
            raise ConfigurationError(f"a machine is described by an object of names and values, got {content!r}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(content) - known):
            raise ConfigurationError(f"a machine has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigurationError(f"the description of a machine doesn't fit: {error}") from error


def _nvidia(
    name: str, capability: int, links: int, network_100_gbit: int, flops: float, memory: float, multiprocessors: int, utilisation: float
) -> Machine:
    link, network = links * NVLINK_BYTES_PER_SECOND[capability], network_100_gbit * NIC_BYTES_PER_SECOND_PER_100_GBIT
    return Machine(name, 8, "nvlink", link, network, capability, flops, memory, multiprocessors, utilisation)


# Peaks by NVIDIA's data sheets: V100 single precision, the others dense bfloat16. The shares of the peak are round assumptions: 0.7 where
# nothing but plain single precision is to be fed, 0.4 for tensor cores.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _nvidia("dgx1-v100", 70, 6, 4, 15.7e12, 900e9, 80, 0.7),
        _nvidia("v100-one-nic", 70, 6, 1, 15.7e12, 900e9, 80, 0.7),
        _nvidia("dgx-a100", 80, 12, 16, 312e12, 2039e9, 108, 0.4),
        _nvidia("dgx-h100", 90, 18, 32, 989e12, 3350e9, 132, 0.4),
        _nvidia("dgx-b200", 100, 18, 32, 2250e12, 8000e9, 148, 0.4),
    )
}


def machine(text: str) -> Machine:
    """A machine by its name in `MACHINES`, or from a JSON file with the fields of `Machine`.

    Raises:
        ConfigurationError: neither such a name nor such a file.
    """
    if text in MACHINES:
        return MACHINES[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigurationError(f"{text!r} is neither a file nor one of {', '.join(MACHINES)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no JSON: {error}") from error
    return Machine.from_json(content)
