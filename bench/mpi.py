"""MPI as a rival: mpi4py over Debian's OpenMPI. `python -m bench.mpi` sets both up, where apt is at hand and may be used."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

SET_UP_SECONDS = 600


def problem() -> str:
    """Why MPI can't take part; empty if it can."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun here (python -m bench.mpi installs Debian's OpenMPI, as root)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (python -m bench.mpi installs it)"
    return ""


def set_up() -> str:
    """Installs what is missing, if that can be done without asking anybody. Returns what is still in the way."""
    if shutil.which("mpirun") is None and shutil.which("apt-get") and os.geteuid() == 0:
        _run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "openmpi-bin", "libopenmpi3"])
    if shutil.which("mpirun") and importlib.util.find_spec("mpi4py") is None:
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "mpi4py"])
    return problem()


def launcher(ranks: int) -> list[str]:
    """What starts the ranks: also as root, also more than there are cores, and not tied to one, because the rivals have threads."""
    environment = ["-x", "PYTHONPATH"] if "PYTHONPATH" in os.environ else []
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *environment, "-np", str(ranks)]


def _run(command: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(command, env=environment, timeout=SET_UP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{command[0]} failed: {error}\n")


if __name__ == "__main__":
    found = set_up()
    sys.exit(f"no MPI: {found}" if found else 0)
