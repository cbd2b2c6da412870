"""Writes the dashboard of ``deploy/observe``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.tools.dev.observe.board import board

DASHBOARD: Final = Path(__file__).resolve().parents[3] / "deploy" / "observe" / "dashboard.json"


def main() -> None:
    """Write it."""
    DASHBOARD.write_text(board(), encoding="utf-8")


if __name__ == "__main__":
    main()
