"""The options of the nccl transport, each with the libnccl version that has it: what a version lacks is found before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ddpcomm.comm.nccl_library import MINIMUM_VERSION, Version, dotted
from ddpcomm.errors import ConfigurationError, ConfigurationTypeError

MemoryChoice = Literal["auto", "window", "registered", "plain"]
_MOST_COMMUNICATORS = 32


def _since(major: int, minor: int, patch: int = 0) -> Any:
    """A field that goes into ncclConfig_t; None leaves it at libnccl's own default."""
    return field(default=None, metadata={"since": (major, minor, patch)})


@dataclass(frozen=True, kw_only=True)
class NcclOptions:
    """Options of `NcclCommunicator`. All ranks give the same.

    Attributes:
        communicators: how many NCCL communicators take the collectives in turn, each on its own stream.
        side_by_side: whether several communicators may run at the same time. None: where libnccl orders their kernels alike on all ranks
            (2.31 on), else each waits for the one before, because kernels that start in different orders can wait for each other for
            ever. True: also without; set NCCL_LAUNCH_ORDER_IMPLICIT=1 (2.26 on) then.
        memory: what `empty` gives. "window": symmetric windows (2.27 on), "registered": ncclCommRegister, "plain": torch's own memory,
            "auto": the first of these that works on all ranks. A named one that doesn't work is an error.
        blocking: whether libnccl's calls block. Then a time limit can't end a call that hangs within libnccl.

    The others are fields of ncclConfig_t and mean what NCCL's documentation says; those of point-to-point and one-sided operations, and
    of splitting, are left out.
    """

    communicators: int = 1
    side_by_side: bool | None = None
    memory: MemoryChoice = "auto"
    blocking: bool = False
    cga_cluster_size: int | None = _since(2, 17)
    min_ctas: int | None = _since(2, 17)
    max_ctas: int | None = _since(2, 17)
    net_name: str | None = _since(2, 17)
    traffic_class: int | None = _since(2, 26)
    comm_name: str | None = _since(2, 27)
    collnet_enable: bool | None = _since(2, 27)
    cta_policy: int | None = _since(2, 27)
    shrink_share: bool | None = _since(2, 27)
    nvls_ctas: int | None = _since(2, 27, 1)
    nvlink_centric_sched: bool | None = _since(2, 28, 2)
    graph_usage_mode: int | None = _since(2, 29)
    graph_stream_ordering: int | None = _since(2, 30, 5)
    launch_order_implicit: bool | None = _since(2, 31)
    nvls_host_mode: int | None = _since(2, 32)

    @classmethod
    def from_keywords(cls, options: Mapping[str, Any]) -> NcclOptions:
        """Checks names, types and ranges.

        Raises:
            ConfigurationError, ConfigurationTypeError: an option is unknown, or its value can't be.
        """
        known = {each.name: str(each.type) for each in fields(cls)}
        if unknown := sorted(options.keys() - known.keys()):
            raise ConfigurationError(f"transport nccl has no option {', '.join(unknown)}; it has {', '.join(known)}")
        for name, value in options.items():
            if not _has_type(value, known[name]):
                raise ConfigurationTypeError(f"{name} must be {known[name]}, got {value!r}")
        made = cls(**options)
        if made.memory not in get_args(MemoryChoice):
            raise ConfigurationError(f"memory must be one of {get_args(MemoryChoice)}, got {made.memory!r}")
        if not 1 <= made.communicators <= _MOST_COMMUNICATORS:
            raise ConfigurationError(f"communicators must be from 1 to {_MOST_COMMUNICATORS}, got {made.communicators}")
        if made.min_ctas is not None and made.max_ctas is not None and made.min_ctas > made.max_ctas:
            raise ConfigurationError(f"min_ctas ({made.min_ctas}) must not be more than max_ctas ({made.max_ctas})")
        return made

    def config(self, version: Version) -> dict[str, int | str]:
        """The fields of ncclConfig_t that are set.

        Raises:
            ConfigurationError: this libnccl lacks one of them.
        """
        config: dict[str, int | str] = {"blocking": int(self.blocking)}
        if self.communicators > 1 and self.launch_order_implicit is None and _knows(version, "launch_order_implicit"):
            config["launch_order_implicit"] = 1
        for each in fields(self):
            value = getattr(self, each.name)
            if "since" not in each.metadata or value is None:
                continue
            if not _knows(version, each.name):
                raise ConfigurationError(
                    f"{each.name} needs libnccl {dotted(each.metadata['since'])} or newer, and {dotted(version)} is loaded; "
                    "leave it out or install a newer nvidia-nccl package"
                )
            config[each.name] = value if isinstance(value, str) else int(value)
        return config

    def runs_side_by_side(self, version: Version) -> bool:
        """Whether several communicators may run at the same time, see `side_by_side`."""
        if self.side_by_side is None:
            return _knows(version, "launch_order_implicit") and self.launch_order_implicit is not False
        return self.side_by_side


def _knows(version: Version, name: str) -> bool:
    since: Version = next(each.metadata.get("since", MINIMUM_VERSION) for each in fields(NcclOptions) if each.name == name)
    return version >= since


def _has_type(value: object, annotation: str) -> bool:
    """Whether a value fits one of the annotations above; a bool is no int."""
    if value is None:
        return "None" in annotation
    wanted = {"int": int, "bool": bool, "str": str, "MemoryChoice": str}[annotation.removesuffix(" | None")]
    return type(value) is wanted or (wanted is int and isinstance(value, int) and not isinstance(value, bool))
