"""What ``kvstore doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

State = Literal["ok", "warning", "error"]
STATES: Final[tuple[State, ...]] = get_args(State)
"""From good to bad."""


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, what was found, and what to do about it."""

    topic: str
    state: State
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        below = f"\n           {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.topic}: {self.found}{below}"
