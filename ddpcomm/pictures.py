"""What all pictures have in common: they need matplotlib, and a file whose ending it knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpcomm.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """
    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"pictures need matplotlib: pip install 'ddpcomm[plot]' ({error})") from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Writes it. Its directory is made.

    Raises:
        ConfigurationError: the path names no kind of picture that matplotlib knows.
        OSError: the file can't be written.
    """
    if not path.suffix:
        raise ConfigurationError(f"a picture's file must have an ending, such as .png, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigurationError(f"{path} can't be drawn: {error}") from error
