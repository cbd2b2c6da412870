"""Figures for commands with ``--plot``, drawn with matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.model.errors import ConfigError


def require_plotting() -> None:
    """Check for matplotlib before the work starts, instead of failing after it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    new_figure(1.0, 1.0)


def new_figure(width_inches: float, height_inches: float) -> Any:  # noqa: ANN401 - matplotlib's, which may not be installed
    """Return an empty figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'vllm-kvstore[plot]'") from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: Any, file: Path) -> None:  # noqa: ANN401 - see new_figure
    """Write a figure; the file's suffix chooses the format.

    Raises:
        ConfigError: the file cannot be written, or there is no such format.
    """
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {file}: {error}") from error
