"""Binding of a model's tensors to a paged KV cache: finds every layer's blocks, derives the layout, selects copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.model.errors import LayoutError
from kvstore.model.layout import KVLayout
from kvstore.paged.base import HostPagedKV, PagedKV
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.grouped import GroupedPagedKV
from kvstore.paged.planes import LayerCache, find_planes, layout_of


def bind_paged_kv(
    kv_caches: Mapping[str, LayerCache],
    *,
    num_blocks: int,
    block_tokens: int,
    chunk_tokens: int,
    reserved_blocks: int = 0,
    packing: str = "",
    has_channels: bool = True,
    beside: PagedKV | None = None,
    piece_bytes: int = 0,
) -> PagedKV:
    """Find the blocks of all layers and select the class that copies them.

    Args:
        kv_caches: layer name to the tensor, or pair of tensors, that holds its blocks; the order is the payload's.
        num_blocks: blocks of the serving engine's block manager.
        block_tokens: tokens in such a block.
        chunk_tokens: tokens in a chunk; a multiple of ``block_tokens``.
        reserved_blocks: the number of blocks, from the first on, that the serving engine reserves: they are neither
            read nor written.
        packing: what decides the order of bytes in a block in addition to strides: on CPUs, the instruction set in use.
        has_channels: True if the shapes show which elements are one channel of K or V over several tokens. They do not
            for MLA's latents, nor for packed blocks.
        beside: another group of layers on the same device, with which buffers are shared.
        piece_bytes: the minimum size of a buffer, which is the most that several groups move at once; 0 for a chunk of
            these layers.

    Raises:
        LayoutError: a layer's layout is not supported, or layers differ in a way a payload cannot hold.
    """
    if num_blocks < 1:
        raise LayoutError(f"a KV cache of {num_blocks} blocks holds nothing")
    layers = [find_planes(name, cache, num_blocks) for name, cache in kv_caches.items()]
    if not layers or not layers[0]:
        raise LayoutError("there is no layer with a KV cache: nothing to store")
    device = layers[0][0].rows.device
    layout = layout_of(layers, device.type, block_tokens, chunk_tokens, packing, has_channels=has_channels)
    if device.type == "cpu":
        return HostPagedKV(layers, layout, num_blocks, reserved_blocks)
    assert beside is None or isinstance(beside, DevicePagedKV), "all groups are on one device"
    return DevicePagedKV(layers, layout, num_blocks, reserved_blocks, piece_bytes=piece_bytes, beside=beside)


def bind_groups(
    groups: Sequence[PagedKV | None], full: Sequence[int], *, block_tokens: int, chunk_tokens: int
) -> GroupedPagedKV:
    """Combine several groups of layers, whose blocks come from one pool of ids, into one cache.

    Args:
        groups: the cache of each group, in the order of their numbers; None for one without layers on this rank.
        full: the groups that keep all tokens, whose blocks form a chunk.
        block_tokens: the tokens after which a block of every group ends, including groups without a layer here, so
            that all ranks count a chunk's blocks alike.
        chunk_tokens: tokens in a chunk.

    Raises:
        LayoutError: a chunk cannot hold these layers, or there are none.
    """
    bound = [group for group in groups if group is not None]
    if not bound:
        raise LayoutError("there is no layer with a KV cache: nothing to store")
    physical = " ".join("-" if group is None else group.layout.fingerprint for group in groups)
    in_chunks = [group.layout for number in full if (group := groups[number]) is not None]
    planes = {layout.planes for layout in in_chunks} or {1}
    elements = {layout.element for layout in in_chunks}
    if len(planes) != 1:
        raise LayoutError(f"layers that keep all tokens differ in planes {planes}")
    pages = [page * (block_tokens // layout.block_tokens) for layout in in_chunks for page in layout.page_bytes]
    layout = KVLayout(
        page_bytes=tuple(pages) or (max(group.layout.block_bytes for group in bound),),
        planes=planes.pop(),
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        physical=f"groups {physical}",
        element=elements.pop() if len(elements) == 1 else "opaque",
    )
    return GroupedPagedKV(groups, layout)
