"""Quotas: what the namespaces of one tenant, or of one model, may hold together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvstore.keys import Namespace
from kvstore.server.spaces import NO_QUOTA, Quota

ANY_NAME: Final = "*"  # those not named


class Quotas:
    """All quotas. Belongs to the thread that decides.

    A tenant has one for all that it holds, under its own name. Chunks of clients without a tenant count by what these
    say that they are: by the namespace's id or its model where one of these is named, and all others together.

    Args:
        given: bytes by name; ``*`` for those not named.
    """

    def __init__(self, given: Mapping[str, int]) -> None:
        self._given = given
        self._known: dict[tuple[str, str], Quota] = {}

    def __iter__(self) -> Iterator[Quota]:
        """Those of all namespaces that ever came."""
        return iter(self._known.values())

    def find(self, tenant: str, namespace: Namespace, space_id: bytes) -> Quota:
        """The quota of a namespace."""
        model = str(namespace.fields.get("model", ""))
        ids = (namespace.id.hex(), space_id.hex())  # the second was shown by earlier versions
        names = (tenant, ANY_NAME) if tenant else (*ids, model, model.removeprefix("id "), ANY_NAME)
        name = next((name for name in names if name in self._given), "")
        quota = self._known.get((tenant, name))
        if quota is None:
            quota = self._known[tenant, name] = Quota(tenant, name, self._given.get(name, NO_QUOTA))
        return quota
