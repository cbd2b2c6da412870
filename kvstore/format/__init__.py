"""Bytes of chunks outside memory: chunk files, packs and codecs. ``docs/FORMAT.md`` describes them."""
