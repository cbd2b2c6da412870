"""All namespaces of a server, and bounds on their number. Plain state, one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.server.quotas import Quotas
from kvstore.server.spaces import Space

MAX_SPACES: Final = 4096
MAX_TENANT_SPACES: Final = MAX_SPACES // 4  # of one tenant
MAX_FAR_SPACES: Final = MAX_SPACES * 3 // 4  # beyond which network clients cannot add more


class Spaces(dict[bytes, Space]):
    """All namespaces by id. Belongs to the thread that decides.

    Args:
        quotas: the quotas of their chunks.
    """

    def __init__(self, quotas: Quotas) -> None:
        super().__init__()
        self.quotas = quotas
        self._forgotten: list[Space] = []

    def enter(self, namespace: Namespace, layout: KVLayout, tenant: str = "", most: int = MAX_SPACES) -> Space | None:
        """Return a tenant's space of a namespace; None if it would exceed ``most``, or the tenant's bound."""
        fresh = Space(namespace, layout, tenant)
        space = self.get(fresh.id)
        if space is not None:
            return space
        if self._is_crowded(tenant, most):
            next(self.forget_empty(), None)
        if self._is_crowded(tenant, most):
            return None
        self.quotas.enter(fresh)
        self[fresh.id] = fresh
        return fresh

    def _is_crowded(self, tenant: str, most: int) -> bool:
        if tenant and sum(space.tenant == tenant for space in self.values()) >= MAX_TENANT_SPACES:
            return True
        return len(self) >= most

    def forget_empty(self) -> Iterator[None]:
        """Forget namespaces without chunks or clients, one in each step."""
        for space in list(self.values()):
            if not (space.num_sessions or space.chunks or space.used_bytes) and space.id in self:
                self._forgotten.append(self.pop(space.id))
                yield

    def take_forgotten(self) -> list[Space]:
        """Take the forgotten namespaces, whose folders are to be deleted after their removals."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten
