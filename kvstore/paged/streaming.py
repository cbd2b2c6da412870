"""Copies of pages between a paged KV cache and payloads in host memory, which write past the processor's caches.

An ordinary store first reads the line of memory that it writes to, so a copy moves three bytes for each of its own. A
*streaming* store does not. The C library uses them only in copies of megabytes, and a page has some KiB. They reached
1.3 to 1.5 times memcpy's bandwidth, where numpy reached 1.0.

Streaming stores are not ordered with later ones: without the fence at the end another thread could be told of a copy
before it sees the bytes.
"""

from __future__ import annotations

import platform
from typing import Final

from kvstore.model.compiling import Kernel, assembled

# A plane is two words, the address of its first page and the bytes from one page to the next. Its ``count`` pages lie
# one after the other in the payload, and ``step`` bytes behind those of the plane before. Returns the number of planes
# copied: fewer than there are if an id is not in the cache, as ids may have changed since they were checked.
#
# Lines of 64 bytes are streamed, and what is left before and behind them is copied byte by byte. Sources are scattered,
# so the next page is fetched meanwhile, unless pages are so long that it would displace the current one.
_TEXT: Final = """
declare void @llvm.x86.sse.sfence()
declare void @llvm.prefetch(i8*, i32, i32, i32)

define internal void @copy_bytes(i64 %begin, i64 %end, i64 %back) {
entry:
  br label %check
check:
  %target = phi i64 [%begin, %entry], [%next, %copy]
  %more = icmp ult i64 %target, %end
  br i1 %more, label %copy, label %done
copy:
  %source = add i64 %target, %back
  %from = inttoptr i64 %source to i8*
  %to = inttoptr i64 %target to i8*
  %byte = load i8, i8* %from
  store i8 %byte, i8* %to
  %next = add i64 %target, 1
  br label %check
done:
  ret void
}

define internal void @stream_lines(i64 %begin, i64 %end, i64 %back, i64 %lead) {
entry:
  br label %check
check:
  %target = phi i64 [%begin, %entry], [%next, %copy]
  %more = icmp ult i64 %target, %end
  br i1 %more, label %copy, label %done
copy:
  %source = add i64 %target, %back
  %ahead = add i64 %source, %lead
  %hint = inttoptr i64 %ahead to i8*
  call void @llvm.prefetch(i8* %hint, i32 0, i32 2, i32 1)
  %from = inttoptr i64 %source to <8 x i64>*
  %to = inttoptr i64 %target to <8 x i64>*
  %line = load <8 x i64>, <8 x i64>* %from, align 1
  store <8 x i64> %line, <8 x i64>* %to, align 64, !nontemporal !0
  %next = add i64 %target, 64
  br label %check
done:
  ret void
}

define internal void @copy_page(i64 %source, i64 %target, i64 %bytes, i64 %lead) {
  %end = add i64 %target, %bytes
  %back = sub i64 %source, %target
  %target_up = add i64 %target, 63
  %aligned = and i64 %target_up, -64
  %has_lines = icmp ult i64 %aligned, %end
  %begin = select i1 %has_lines, i64 %aligned, i64 %end
  %rest = sub i64 %end, %begin
  %lines = and i64 %rest, -64
  %tail = add i64 %begin, %lines
  call void @copy_bytes(i64 %target, i64 %begin, i64 %back)
  call void @stream_lines(i64 %begin, i64 %tail, i64 %back, i64 %lead)
  call void @copy_bytes(i64 %tail, i64 %end, i64 %back)
  ret void
}

define internal i64 @word(i64 %table, i64 %index) {
  %offset = mul i64 %index, 8
  %address = add i64 %table, %offset
  %at = inttoptr i64 %address to i64*
  %value = load i64, i64* %at
  ret i64 %value
}

define i64 @move_pages(i64 %planes, i64 %num_planes, i64 %page_bytes, i64 %num_blocks,
                       i64 %ids, i64 %count, i64 %payload, i64 %step, i64 %gathers) {
entry:
  %is_gather = icmp ne i64 %gathers, 0
  %is_short = icmp ule i64 %page_bytes, 262144
  br label %planes_check
planes_check:
  %plane = phi i64 [0, %entry], [%plane_next, %plane_done]
  %part = phi i64 [%payload, %entry], [%part_next, %plane_done]
  %has_plane = icmp ult i64 %plane, %num_planes
  br i1 %has_plane, label %plane_begin, label %end
plane_begin:
  %entry_index = mul i64 %plane, 2
  %stride_index = add i64 %entry_index, 1
  %base = call i64 @word(i64 %planes, i64 %entry_index)
  %stride = call i64 @word(i64 %planes, i64 %stride_index)
  br label %blocks_check
blocks_check:
  %block = phi i64 [0, %plane_begin], [%block_next, %block_copy]
  %row = phi i64 [%part, %plane_begin], [%row_next, %block_copy]
  %has_block = icmp ult i64 %block, %count
  br i1 %has_block, label %block_find, label %plane_done
block_find:
  %id = call i64 @word(i64 %ids, i64 %block)
  %is_there = icmp ult i64 %id, %num_blocks
  br i1 %is_there, label %block_copy, label %end
block_copy:
  %page_offset = mul i64 %id, %stride
  %page = add i64 %base, %page_offset
  %source = select i1 %is_gather, i64 %page, i64 %row
  %target = select i1 %is_gather, i64 %row, i64 %page
  %block_next = add i64 %block, 1
  %has_next = icmp ult i64 %block_next, %count
  %next_index = select i1 %has_next, i64 %block_next, i64 %block
  %next_id = call i64 @word(i64 %ids, i64 %next_index)
  %ids_between = sub i64 %next_id, %id
  %pages_between = mul i64 %ids_between, %stride
  %jump = select i1 %is_gather, i64 %pages_between, i64 %page_bytes
  %lead = select i1 %is_short, i64 %jump, i64 64
  call void @copy_page(i64 %source, i64 %target, i64 %page_bytes, i64 %lead)
  %row_next = add i64 %row, %page_bytes
  br label %blocks_check
plane_done:
  %plane_next = add i64 %plane, 1
  %part_next = add i64 %part, %step
  br label %planes_check
end:
  call void @llvm.x86.sse.sfence()
  ret i64 %plane
}

!0 = !{i32 1}
"""
_ARGUMENTS: Final = 9


def page_mover() -> Kernel | None:
    """Compile the copies, once in a process; None where numpy has to make them."""
    return assembled(_TEXT, "move_pages", _ARGUMENTS) if platform.machine() == "x86_64" else None
