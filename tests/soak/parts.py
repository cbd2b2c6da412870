"""Parts of the soak, in the order in which they run."""

from __future__ import annotations

from typing import Final

from soak import churn, clients, killed, messages, operations, parsing, requests
from soak.part import Part

PARTS: Final[tuple[Part, ...]] = (
    messages.PART,
    requests.PART,
    parsing.PART,
    operations.PART,
    killed.PART,
    churn.PART,
    clients.PART,
)
