"""Findings of ``kvstore doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

State = Literal["ok", "warning", "error"]
STATES: Final[tuple[State, ...]] = get_args(State)
"""States of a finding, from good to bad."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: its topic, its state, the finding in words, and a remedy."""

    topic: str
    state: State
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        below = f"\n           {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.topic}: {self.found}{below}"
