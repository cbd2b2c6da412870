"""KV cache geometries that the bench moves: named models, and others given by numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvstore.model.errors import ConfigError

_ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Geometry:
    """KV cache of a model on one worker, in bfloat16.

    Attributes:
        name: as ``--geometry`` takes it.
        layers: layers with a KV cache.
        kv_heads: KV heads of a layer.
        head_size: elements of a head, for K and for V; or of the latent.
        latent: K and V are one row of elements, as with MLA.
        block_tokens: tokens in a block of vLLM.
        chunk_tokens: tokens in a chunk.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    latent: bool = False
    block_tokens: int = 16
    chunk_tokens: int = 256

    @property
    def token_elements(self) -> int:
        """Elements of a token in one layer."""
        return self.kv_heads * self.head_size * (1 if self.latent else 2)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers, with K and V."""
        return self.layers * self.block_tokens * self.token_elements * _ELEMENT_BYTES

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.blocks_per_chunk * self.block_bytes


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("llama-8b", layers=32, kv_heads=8, head_size=128),
        Geometry("llama-70b-tp8", layers=80, kv_heads=1, head_size=128),  # one of eight workers
        Geometry("qwen-0.5b", layers=24, kv_heads=2, head_size=64),
        Geometry("deepseek-mla", layers=61, kv_heads=1, head_size=576, latent=True),
    )
}
TINY = Geometry("tiny", layers=1, kv_heads=1, head_size=8)  # where the size of a chunk does not count
_NUMBERS = tuple(field.name for field in fields(Geometry) if field.name != "name")


def parse_geometry(text: str) -> Geometry:
    """Parse a name of ``GEOMETRIES``, or numbers: ``layers=28,kv_heads=4,head_size=128``.

    Numbers may also include ``latent=1``, ``block_tokens`` and ``chunk_tokens``.

    Raises:
        ConfigError: the text is neither, or no cache can have these numbers.
    """
    if text in GEOMETRIES:
        return GEOMETRIES[text]
    if "=" not in text:
        raise ConfigError(
            f"geometry {text!r} is not one of {', '.join(GEOMETRIES)}, nor numbers such as "
            "layers=28,kv_heads=4,head_size=128"
        )
    numbers = dict(_number(text, part) for part in text.split(","))
    missing = [name for name in ("layers", "kv_heads", "head_size") if name not in numbers]
    if missing:
        raise ConfigError(f"geometry {text!r} does not say {', '.join(missing)}")
    latent = bool(numbers.pop("latent", 0))
    geometry = Geometry(text, latent=latent, **numbers)
    if geometry.chunk_tokens % geometry.block_tokens:
        raise ConfigError(f"geometry {text!r}: chunk_tokens must be a multiple of block_tokens")
    if geometry.latent and geometry.kv_heads != 1:
        raise ConfigError(f"geometry {text!r}: a latent has one head, not {geometry.kv_heads}")
    return geometry


def _number(text: str, part: str) -> tuple[str, int]:
    name, _, value = part.partition("=")
    if name not in _NUMBERS or not value.isdecimal() or not (int(value) or name == "latent"):
        raise ConfigError(f"geometry {text!r}: {part!r} is no positive number of {', '.join(_NUMBERS)}")
    return name, int(value)
