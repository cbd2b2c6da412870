"""Offline warming: prompts computed and stored before the first user asks."""

from __future__ import annotations

from kvstore.tools.warm.warming import WarmReport, warm

__all__ = ["WarmReport", "warm"]
