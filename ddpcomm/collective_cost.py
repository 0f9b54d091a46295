"""All-reduce times from NCCL's own model: its constants and formulas (NVIDIA/nccl 2.30.7, src/graph/tuning.cc), for any number of ranks.

Ring:  2 (n - 1) steps, of which 2 (hosts - 1) go over the network; each rank sends n / steps of the bus bandwidth.
Tree:  up and down along a chain in each host and a binary tree between hosts; half of 0.92 of the bus bandwidth.
Hierarchical (not one of NCCL's for an all-reduce, but what a hierarchy of communicators does): reduce-scatter in each host, all-reduce of
each rank's share with its fellows on the other hosts, all-gather in each host.

Of the algorithms and protocols that are allowed the fastest counts, as NCCL itself chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from ddpcomm.machines import Machine

_BASE_SECONDS = {
    "tree": {"LL": 6.8e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
    "ring": {"LL": 6.6e-6, "LL128": 14.0e-6, "Simple": 8.4e-6},
}
_HOP_SECONDS = {
    "nvlink": {"tree": {"LL": 0.6e-6, "LL128": 1.25e-6, "Simple": 4.0e-6}, "ring": {"LL": 0.6e-6, "LL128": 1.9e-6, "Simple": 3.4e-6}},
    "pci": {"tree": {"LL": 1.0e-6, "LL128": 1.9e-6, "Simple": 4.0e-6}, "ring": {"LL": 1.0e-6, "LL128": 2.5e-6, "Simple": 5.7e-6}},
    "net": {"tree": {"LL": 5.0e-6, "LL128": 8.5e-6, "Simple": 14.0e-6}, "ring": {"LL": 2.7e-6, "LL128": 4.0e-6, "Simple": 14.0e-6}},
}
_NETWORK_OVERHEAD_SECONDS = 1.0e-6  # on Intel hosts
_SIMPLE_OVERHEAD_FACTOR = 3
_TREE_EFFICIENCY = 0.92
_PLATEAU_BEFORE_SM80, _PLATEAU = 1.9, 1.4
# How many of the bytes on the wire are data: LL sends a flag with every 4 bytes of data, LL128 one in 128.
_PAYLOAD = {"LL": 4 / 8, "LL128": 120 / 128, "Simple": 1.0}
ALGORITHMS = ("ring", "tree", "hierarchical")


@dataclass(frozen=True)
class CollectiveCost:
    """A cost model for `ranks` GPUs of a machine.

    Args:
        machine: hosts and links.
        ranks: how many take part; hosts are filled one after another.
        algorithms: some of `ALGORITHMS`: which are allowed.
        latency_factor, bandwidth_factor: free parameters, 1 where nothing was measured; see `fitted`.
    """

    machine: Machine
    ranks: int
    algorithms: tuple[str, ...] = ("ring", "tree")
    latency_factor: float = 1.0
    bandwidth_factor: float = 1.0

    def seconds(self, size_bytes: float) -> float:
        return min(latency + per_byte * size_bytes for latency, per_byte in self.lines.values()) if self.ranks > 1 else 0.0

    @cached_property
    def lines(self) -> dict[str, tuple[float, float]]:
        """Latency and seconds a byte, by algorithm and protocol."""
        machine, hosts = self.machine, self.machine.hosts(self.ranks)
        local = min(self.ranks, machine.ranks_per_host)
        inside, network = machine.link_bytes_per_second, machine.network_bytes_per_second
        bus = inside if hosts == 1 else min(inside, network)
        found: dict[str, tuple[float, float]] = {}
        for protocol in self._protocols():
            if "ring" in self.algorithms:
                found[f"ring {protocol}"] = self._ring(protocol, self.ranks, hosts, bus)
            if "tree" in self.algorithms:
                found[f"tree {protocol}"] = self._tree(protocol, local, hosts, bus)
            if "hierarchical" in self.algorithms and 1 < local < self.ranks:
                # A reduce-scatter and an all-gather are the two halves of a ring's all-reduce, each with a launch of its own. In between
                # every rank reduces its share with its fellows over its part of the network.
                latency, per_byte = self._ring(protocol, local, 1, inside)
                latency += self.latency_factor * _BASE_SECONDS["ring"][protocol]
                between = {
                    "ring": self._ring(protocol, hosts, hosts, network / local),
                    "tree": self._tree(protocol, 1, hosts, network / local),
                }
                for name, line in between.items():
                    found[f"hierarchical {name} {protocol}"] = latency + line[0], per_byte + line[1] / local
        return found

    def fitted(self, points: tuple[tuple[int, float], ...]) -> CollectiveCost:
        """The two free parameters by least squares of the relative error at measured points (bytes, seconds), on a grid that is refined."""

        def error(candidate: CollectiveCost) -> float:
            return sum((candidate.seconds(size) / seconds - 1) ** 2 for size, seconds in points)

        best, spread = self, 4.0
        while spread > 1.002:
            ratios = [spread ** (step / 4) for step in range(-4, 5)]
            candidates = [
                replace(best, latency_factor=best.latency_factor * a, bandwidth_factor=best.bandwidth_factor * b)
                for a in ratios
                for b in ratios
            ]
            best = min(candidates, key=error)
            spread **= 0.5
        return best

    def _protocols(self) -> tuple[str, ...]:
        one_host = self.machine.hosts(self.ranks) == 1
        return ("LL", "LL128", "Simple") if one_host or self.machine.compute_capability >= 80 else ("LL", "Simple")

    def _ring(self, protocol: str, ranks: int, hosts: int, bus: float) -> tuple[float, float]:
        steps, network_steps = 2 * (ranks - 1), 2 * (hosts - 1)
        inner, outer = _HOP_SECONDS[self.machine.link]["ring"][protocol], _HOP_SECONDS["net"]["ring"][protocol]
        if hosts > 1:
            inner = max(inner, _NETWORK_OVERHEAD_SECONDS * (_SIMPLE_OVERHEAD_FACTOR if protocol == "Simple" else 1))
        latency = _BASE_SECONDS["ring"][protocol] + (steps - network_steps) * inner + network_steps * outer
        if hosts > 1 and protocol == "Simple":
            latency *= _PLATEAU_BEFORE_SM80 if self.machine.compute_capability < 80 else _PLATEAU
        return self._line(latency, steps / ranks, bus, protocol)

    def _tree(self, protocol: str, local: int, hosts: int, bus: float) -> tuple[float, float]:
        inner, outer = _HOP_SECONDS[self.machine.link]["tree"][protocol], _HOP_SECONDS["net"]["tree"][protocol]
        latency = _BASE_SECONDS["tree"][protocol] + 2 * ((local - 1) * inner + log2(hosts) * outer)
        return self._line(latency, 2 / _TREE_EFFICIENCY, bus, protocol)

    def _line(self, latency: float, wire_bytes_per_byte: float, bus: float, protocol: str) -> tuple[float, float]:
        return latency * self.latency_factor, wire_bytes_per_byte / (bus * self.bandwidth_factor * _PAYLOAD[protocol])
