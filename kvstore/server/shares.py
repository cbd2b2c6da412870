"""Shares: amounts that clients hold of one resource, bounded for each key, for each socket and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.server.clients import Client


class Shares:
    """Amounts that clients hold. Belongs to the thread that decides.

    Args:
        most: bound for all clients together.
        by_socket: bounds for the clients of a socket; ``most`` for sockets that are not named.
        by_key: bound for the clients with the same key; None for the bound of their socket.
    """

    def __init__(self, most: int, by_socket: Mapping[int, int] | None = None, by_key: int | None = None) -> None:
        self.held = 0
        self._most = most
        self._by_socket = by_socket or {}
        self._by_key = by_key
        self._of_socket = Counter[int]()
        self._of_key = Counter[str]()

    def has_room(self, client: Client, amount: int) -> bool:
        """Tell if a client may hold so much more."""
        if self.held + amount > self._most:
            return False
        if self._of_socket[client.socket] + amount > self._by_socket.get(client.socket, self._most):
            return False
        return self._by_key is None or not client.name or self._of_key[client.name] + amount <= self._by_key

    def take(self, client: Client, amount: int) -> None:
        """Note that a client holds so much more."""
        self.held += amount
        self._of_socket[client.socket] += amount
        if client.name:
            self._of_key[client.name] += amount

    def give(self, client: Client, amount: int) -> None:
        """Note that a client holds so much less."""
        self.take(client, -amount)
