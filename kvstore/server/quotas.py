"""Quotas: limits on the bytes of namespaces, which may change while the server runs. Plain state, one thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest

from kvstore.model.keys import Namespace
from kvstore.model.quotas import ANY_NAME
from kvstore.server.spaces import NO_QUOTA, Quota, Space


class Quotas:
    """All quotas. Belongs to the thread that decides.

    A tenant has one quota for all of its chunks, under its name. Chunks of clients without a tenant count against the
    quota named after their namespace's id or its model, and all others against one common quota.

    Args:
        given: bytes by name; ``*`` for those not named.

    Attributes:
        given: the same, as last changed.
    """

    def __init__(self, given: Mapping[str, int]) -> None:
        self.given = given
        self._known: dict[tuple[str, str], Quota] = {}

    def __iter__(self) -> Iterator[Quota]:
        """Iterate over the quotas of all namespaces so far."""
        return iter(self._known.values())

    def find(self, tenant: str, namespace: Namespace, space_id: bytes) -> Quota:
        """Return the quota of a namespace."""
        model = str(namespace.fields.get("model", ""))
        ids = (namespace.id.hex(), space_id.hex())  # earlier versions showed users the second one
        names = (tenant, ANY_NAME) if tenant else (*ids, model, model.removeprefix("id "), ANY_NAME)
        name = next((name for name in names if name in self.given), "")
        quota = self._known.get((tenant, name))
        if quota is None:
            quota = self._known[tenant, name] = Quota(tenant, name, self._limit_of(name))
        return quota

    def change(self, given: Mapping[str, int], spaces: Mapping[bytes, Space]) -> Iterator[None]:
        """Apply other limits, in steps. Nothing is evicted, so a quota may hold more than its limit afterwards.

        A quota that had no limit, or gets other namespaces, knows no order of use. Its namespaces do, and are mixed
        evenly.
        """
        self.given = given
        for quota in self._known.values():
            quota.limit_bytes = self._limit_of(quota.name)
        joined = set[Quota]()
        for space in list(spaces.values()):
            quota = self.find(space.tenant, space.namespace, space.id)
            if space.quota is not quota:
                space.count_against(quota)
                joined.add(quota)
            yield
        for quota in list(self._known.values()):
            yield from quota.settle(keeps_order=quota not in joined)
        members = defaultdict[Quota, list[Space]](list)
        for space in spaces.values():
            members[space.quota].append(space)
        self._known = {key: quota for key, quota in self._known.items() if quota in members}
        for quota in members:
            if quota.limit_bytes != NO_QUOTA:
                yield from _learn_order(quota, members[quota])

    def _limit_of(self, name: str) -> int:
        return self.given.get(name, NO_QUOTA) if name else NO_QUOTA


def _learn_order(quota: Quota, spaces: Collection[Space]) -> Iterator[None]:
    """Note all chunks of a quota, those used last first, in steps."""
    for group in zip_longest(*(reversed(list(space.chunks.values())) for space in spaces)):
        for chunk in group:
            if chunk is not None and not chunk.is_gone:
                quota.adopt(chunk)
            yield
