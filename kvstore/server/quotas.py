"""Quotas: limits on the bytes of namespaces and owners, which may change while the server runs. Plain state."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from kvstore.model.keys import Namespace
from kvstore.model.quotas import ANY_NAME, owner_named
from kvstore.server.spaces import NO_QUOTA, Quota, Space


class Quotas:
    """All quotas. Belongs to the thread that decides.

    A chunk counts against one. That is the quota of its owner, if the namespace's tenant has one for that id; clients
    name ids, and their keys the tenant. Otherwise it is that of the namespace: a tenant has one quota for all of its
    chunks, under its name. Chunks of clients without a tenant count against the quota named after their namespace's id
    or its model, and all others against one common quota.

    Args:
        given: bytes by name; ``*`` for those not named.

    Attributes:
        given: the same, as last changed.
    """

    def __init__(self, given: Mapping[str, int]) -> None:
        self._known: dict[tuple[str, str], Quota] = {}
        self._owned: dict[str, dict[bytes, Quota]] = {}  # by tenant and id
        self._take(given)

    def __iter__(self) -> Iterator[Quota]:
        """Iterate over the quotas of all namespaces so far, and of all owners."""
        return chain(self._known.values(), *(owned.values() for owned in self._owned.values()))

    def enter(self, space: Space) -> None:
        """Let a namespace, which is empty, count against its quotas."""
        space.owned = self._owned.get(space.tenant, {})
        space.common.count_against(self._find(space.tenant, space.namespace, space.id))

    def _find(self, tenant: str, namespace: Namespace, space_id: bytes) -> Quota:
        """Return the quota of a namespace."""
        model = str(namespace.fields.get("model", ""))
        ids = (namespace.id.hex(), space_id.hex())  # earlier versions showed users the second one
        names = (tenant, ANY_NAME) if tenant else (*ids, model, model.removeprefix("id "), ANY_NAME)
        name = next((name for name in names if name in self._by_name), "")
        quota = self._known.get((tenant, name))
        if quota is None:
            quota = self._known[tenant, name] = Quota(tenant, name, self._limit_of(name))
        return quota

    def change(self, given: Mapping[str, int], spaces: Mapping[bytes, Space]) -> Iterator[None]:
        """Apply other limits, in steps. Nothing is evicted, so a quota may hold more than its limit afterwards.

        A quota that had no limit, or gets other chunks, knows no order of use. Namespaces do, and are mixed evenly.
        """
        self._take(given)
        for quota in self._known.values():
            quota.limit_bytes = self._limit_of(quota.name)
        joined = set[Quota]()
        for space in list(spaces.values()):
            yield from self._enter_again(space, joined)
        for quota in list(self):
            yield from quota.settle(keeps_order=quota not in joined)
        in_use = {space.quota for space in spaces.values()}
        self._known = {key: quota for key, quota in self._known.items() if quota in in_use}
        yield from _learn_order([space for space in spaces.values() if space.is_bounded])

    def _take(self, given: Mapping[str, int]) -> None:
        """Note the limits, and make the quotas of owners, or change those that there are."""
        self.given = given
        owners = [owner for owner in map(owner_named, given) if owner is not None]
        self._by_name = {name: limit for name, limit in given.items() if owner_named(name) is None}
        former, self._owned = self._owned, defaultdict(dict)
        for owner in owners:
            quota = former.get(owner.tenant, {}).get(owner.id) or Quota(owner.tenant, owner.name)
            quota.limit_bytes = given[owner.key]
            self._owned[owner.tenant][owner.id] = quota

    def _enter_again(self, space: Space, joined: set[Quota]) -> Iterator[None]:
        """Let a namespace count against the quotas that it has now, in steps; add those that get more chunks."""
        former, space.owned = space.owned, self._owned.get(space.tenant, {})
        common = self._find(space.tenant, space.namespace, space.id)
        for owner, account in [(b"", space.common), *space.accounts.items()]:
            quota = space.owned.get(owner, common)
            if account.quota is not quota and account.used_bytes:
                joined.add(quota)
            account.count_against(quota)
        space.forget_accounts()
        yield
        for chunk in list(space.chunks.values()) if space.owned.keys() - former.keys() else ():
            if not chunk.is_gone and space.move(chunk):
                joined.add(chunk.quota)
            yield

    def _limit_of(self, name: str) -> int:
        return self._by_name.get(name, NO_QUOTA) if name else NO_QUOTA


def _learn_order(spaces: Collection[Space]) -> Iterator[None]:
    """Note all chunks at their quotas, those used last first, in as many steps as there are chunks and namespaces."""
    orders = deque(reversed(list(space.chunks.values())) for space in spaces)
    while orders:
        order = orders.popleft()
        chunk = next(order, None)
        if chunk is not None:
            orders.append(order)
            if not chunk.is_gone:
                chunk.quota.adopt(chunk)
        yield
