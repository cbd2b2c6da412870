"""Offline warming, which computes and stores the KV of prompts before the first request."""

from __future__ import annotations

from kvstore.tools.warm.warming import WarmReport, warm

__all__ = ["WarmReport", "warm"]
