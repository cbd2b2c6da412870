"""Contract of a codec, which encodes one layer of a chunk in fewer bytes, and decodes it.

Every codec guarantees:

- *It never costs space.* An encoded layer is shorter than the layer, or it is the layer itself.
- *It never leaves its buffers.* For any bytes, ``decode`` reads and writes only the two given arrays, and ends with the
  layer or with ``CodecError``. It detects malformed input, not altered values: checksums do that.
- *It allocates little.* It works in the given arrays, and every thread keeps buffers of less than 2 MiB.
- *It is thread-safe*, and releases the GIL while it works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import CodecError, ConfigError


class Codec(ABC):
    """A codec for layers of one layout; ``kvstore.format.codecs.open_codec`` makes one.

    Attributes:
        name: as in a chunk's header.
        is_lossless: True if ``decode`` returns exactly the bytes that were encoded.
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool] = True

    def encode(self, layer: ByteArray, out: ByteArray) -> int:
        """Encode a layer into the front of ``out``, which is at least as long; returns the number of bytes used.

        If that is the length of the layer, the layer was copied as it is.
        """
        size_bytes = self._pack(layer, out[: len(layer)])
        if size_bytes is not None and size_bytes < len(layer):
            return size_bytes
        out[: len(layer)] = layer
        return len(layer)

    def decode(self, data: ByteArray, out: ByteArray) -> None:
        """Turn the output of ``encode`` back into a layer of ``len(out)`` bytes.

        Raises:
            CodecError: no layer of that length was encoded as these bytes; ``out`` is undefined.
        """
        if len(data) == len(out):
            out[:] = data
        elif not 0 < len(data) < len(out):
            raise CodecError(f"{len(data)} bytes are no encoded layer of {len(out)} bytes")
        else:
            self._unpack(data, out)

    @abstractmethod
    def _pack(self, layer: ByteArray, out: ByteArray) -> int | None:
        """Encode ``layer`` into ``out``, which is as long. For None or a size that saves nothing, it is stored raw."""

    @abstractmethod
    def _unpack(self, data: ByteArray, out: ByteArray) -> None:
        """Undo ``_pack`` for data that is not empty and shorter than ``out``.

        Raises:
            CodecError: see ``decode``.
        """


def require(module: str, codec: str) -> Any:  # noqa: ANN401 - modules without types
    """Import a compressor that is not installed with the library itself.

    Raises:
        ConfigError: it is missing; the message names the package to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the codec {codec!r} needs the package {module.partition('.')[0]}, which is not installed: "
            "pip install 'vllm-kvstore[codecs]', or use the codec 'none'"
        ) from error
