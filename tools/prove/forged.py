"""The error of a certificate that is not what it says."""

from __future__ import annotations

from kvstore.model.errors import KVStoreError


class ForgedError(KVStoreError):
    """A certificate does not have its digest, or its signature."""
