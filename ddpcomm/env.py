"""The environment variables that ddpcomm obeys: this is the one place that reads them.

An argument always wins over a variable. They are read when an object that needs them is made, never at import.

| variable | meaning | default |
|---|---|---|
| DDPCOMM_TRANSPORT | transport of communicators made with transport="auto" | auto |
| DDPCOMM_IMPLEMENTATION | implementation of ops' kernels: native, triton, cuda, torch | best for the device |
| DDPCOMM_TIMEOUT_SECONDS | time limit of every collective | the process group's own |
| DDPCOMM_TIMELINE | such as trace.json: ranks record timelines, in files named after it (trace.rank0.json) | none is recorded |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ddpcomm.argument_checks import check_timeout
from ddpcomm.errors import ConfigurationError


@dataclass(frozen=True)
class Environment:
    """A reading of the variables above."""

    transport: str
    implementation: str | None
    timeout: timedelta | None
    timeline: Path | None


def read() -> Environment:
    """Reads the variables.

    Raises:
        ConfigurationError: a variable holds what it must not.
    """
    return Environment(
        transport=os.environ.get("DDPCOMM_TRANSPORT") or "auto",
        implementation=os.environ.get("DDPCOMM_IMPLEMENTATION") or None,
        timeout=_seconds("DDPCOMM_TIMEOUT_SECONDS"),
        timeline=_path("DDPCOMM_TIMELINE"),
    )


def _seconds(name: str) -> timedelta | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a number of seconds, got {text!r}") from None
    if not seconds > 0:
        raise ConfigurationError(f"{name} must be more than 0, got {text!r}")
    try:
        limit = timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        raise ConfigurationError(f"{name} must be a number of seconds that can pass, got {text!r}") from None
    if not limit:
        raise ConfigurationError(f"{name} must be a microsecond or more, got {text!r}")
    return check_timeout(name, limit)


def _path(name: str) -> Path | None:
    text = os.environ.get(name)
    try:
        names_file = not text or (bool(Path(text).name) and not Path(text).is_dir())
    except OSError as error:  # too long, or in a directory that can't be looked into
        raise ConfigurationError(f"{name} must name a file, got {text!r}: {error.strerror}") from error
    if not names_file:
        raise ConfigurationError(f"{name} must name a file, got {text!r}")
    return Path(text) if text else None


def default_gloo_to_loopback() -> None:
    """In a process whose peers are all on this machine: Gloo need not find the machine's name in a network."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def torch_variables(names: Mapping[str, str]) -> dict[str, str]:
    """Torch's own variables, for its logging data: {key: variable}. One that is not set reads "N/A", as there."""
    return {key: os.environ.get(variable, "N/A") for key, variable in names.items()}
