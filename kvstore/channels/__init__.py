"""Channels, by which one process reads another's memory. ``base.py`` holds the contract, this file the registry.

A channel has a name and a factory without arguments. ``BUILT_IN`` lists ours; other packages register theirs in the
entry-point group ``kvstore.channels``. ``docs/tiers.md`` shows how to write one.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from kvstore.model.errors import ChannelError, ConfigError

if TYPE_CHECKING:
    from kvstore.channels.base import Channel
    from kvstore.model.chunks import ByteArray

logger = logging.getLogger(__name__)

GROUP: Final = "kvstore.channels"
BUILT_IN: Final = (EntryPoint("nixl", "kvstore.channels.nixl:NixlChannel", GROUP),)


def known_channels() -> dict[str, EntryPoint]:
    """Return the factories by name, ours before those of other packages. Imports none."""
    return {entry.name: entry for entry in (*entry_points(group=GROUP), *BUILT_IN)}


def open_channel(name: str | None, memory: ByteArray) -> Channel | None:
    """Open a channel and register memory with it; None if no channel is named or it cannot be used here.

    Without a channel KV is sent over TCP. A warning is logged if the named channel cannot be used.

    Args:
        name: as registered; None for no channel.
        memory: uint8 ``[num_bytes]``, the source and target of reads.

    Raises:
        ConfigError: there is no such channel.
    """
    if name is None:
        return None
    entry = known_channels().get(name)
    if entry is None:
        raise ConfigError(f"unknown channel {name!r}: known channels are {', '.join(known_channels())}")
    try:
        channel: Channel = entry.load()()
    except (ImportError, AttributeError, ChannelError) as error:
        logger.warning("KV is sent over TCP: the channel %s cannot be used: %s", name, error)
        return None
    try:
        channel.register(memory)
    except ChannelError as error:
        channel.close()
        logger.warning("KV is sent over TCP: the channel %s cannot register the memory: %s", name, error)
        return None
    return channel
