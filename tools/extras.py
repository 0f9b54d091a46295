"""Prints the extras of this package that fit this machine: `dev`, and `cu12`, `cu13` or `without-gpu` by its NVIDIA driver.

Runs under any Python 3, before anything is installed.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

DRIVER_FILE = Path("/proc/driver/nvidia/version")
FIRST_DRIVER_OF_CUDA_13 = 580  # NVIDIA, "CUDA Compatibility", table of minimum driver versions


def extras(driver: "int | None") -> str:
    if driver is None:
        return "dev,without-gpu"
    return "dev,cu13" if driver >= FIRST_DRIVER_OF_CUDA_13 else "dev,cu12"


def major_version(text: str) -> "int | None":
    """The driver's major version in the driver's own file or in nvidia-smi's answer."""
    found = re.search(r"\b(\d{3})\.\d+(\.\d+)?\b", text)
    return int(found[1]) if found else None


def driver_version() -> "int | None":
    """None where there is no driver."""
    if DRIVER_FILE.exists():
        return major_version(DRIVER_FILE.read_text())
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return major_version(answer.stdout) if answer.returncode == 0 else None
    return None


if __name__ == "__main__":
    sys.stdout.write(extras(driver_version()) + "\n")
