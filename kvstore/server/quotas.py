"""Quotas: limits on the bytes that the namespaces of one tenant, or of one model, hold together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvstore.model.keys import Namespace
from kvstore.server.spaces import NO_QUOTA, Quota

ANY_NAME: Final = "*"  # all that are not named


class Quotas:
    """All quotas. Belongs to the thread that decides.

    A tenant has one quota for all of its chunks, under its name. Chunks of clients without a tenant count against the
    quota named after their namespace's id or its model, and all others against one common quota.

    Args:
        given: bytes by name; ``*`` for those not named.
    """

    def __init__(self, given: Mapping[str, int]) -> None:
        self._given = given
        self._known: dict[tuple[str, str], Quota] = {}

    def __iter__(self) -> Iterator[Quota]:
        """Iterate over the quotas of all namespaces so far."""
        return iter(self._known.values())

    def find(self, tenant: str, namespace: Namespace, space_id: bytes) -> Quota:
        """Return the quota of a namespace."""
        model = str(namespace.fields.get("model", ""))
        ids = (namespace.id.hex(), space_id.hex())  # earlier versions showed users the second one
        names = (tenant, ANY_NAME) if tenant else (*ids, model, model.removeprefix("id "), ANY_NAME)
        name = next((name for name in names if name in self._given), "")
        quota = self._known.get((tenant, name))
        if quota is None:
            quota = self._known[tenant, name] = Quota(tenant, name, self._given.get(name, NO_QUOTA))
        return quota
