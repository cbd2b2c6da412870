"""Names of images, sounds and videos, hashed from the inputs that the model receives. No vLLM types."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from kvstore.model.threads import start

if TYPE_CHECKING:
    from hashlib import _Hash

logger = logging.getLogger(__name__)

_THREADS: Final = 2  # a video of a gigabyte takes half a second
_PLAIN_KINDS: Final = "biufc"  # of NumPy's dtypes: those whose bytes are their content


class Unnamed(NamedTuple):
    """A multimodal item whose identifier does not determine its content, at the tokens ``[offset, offset + length)``.

    Attributes:
        modality: such as ``image``.
        inputs: the model's inputs for it, by name: tensors, numbers and text, and lists of them. Empty if vLLM has not
            sent them.
        offset: position of its first token in the prompt.
        length: number of its tokens.
    """

    modality: str
    inputs: Mapping[str, object]
    offset: int
    length: int


class Contents:
    """Background hashing of multimodal inputs: a picture of 1,000 tokens takes 5 to 10 ms. Thread-safe."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "kvstore-contents")

    def look(self, item: Unnamed) -> Future[str | None]:
        """Start to name an item. The future returns None for an item that cannot be named."""
        return start(self._threads, partial(content_name, item.modality, item.inputs), lambda: None)

    def close(self) -> None:
        """End the threads, after at most the hash that each is computing."""
        self._threads.shutdown(cancel_futures=True)


def content_name(modality: str, inputs: Mapping[str, object]) -> str | None:
    """Return the name of an item's content, equal in every process, or None if the content cannot be hashed here."""
    if not inputs:
        return None
    running = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        _absorb_piece(running, "input", name.encode())
        if not _absorb(running, value):
            return None
    return f"kvstore-{modality}-{running.hexdigest()}"


def _absorb(running: _Hash, value: object) -> bool:
    """Hash a value with its type, so that different values give different bytes; False if it cannot be hashed."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            return False
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        _absorb_piece(running, f"tensor {value.dtype} {tuple(value.shape)}", raw.data)
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _PLAIN_KINDS:
            return False
        _absorb_piece(running, f"array {value.dtype.str} {value.shape}", value.tobytes())
    elif isinstance(value, bool | int | float | str):
        _absorb_piece(running, type(value).__name__, repr(value).encode())
    elif isinstance(value, list | tuple):  # a tuple is a list once it has been sent between processes
        _absorb_piece(running, f"list {len(value)}", b"")
        return all(_absorb(running, part) for part in value)
    else:  # also None: vLLM has it in a cache of its own
        return False
    return True


def _absorb_piece(running: _Hash, head: str, body: bytes | memoryview) -> None:
    raw = head.encode()
    running.update(struct.pack("<IQ", len(raw), len(body)) + raw)
    running.update(body)
