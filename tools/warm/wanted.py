"""Chunks of prompts, under the keys that vLLM looks up, computed without vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstore.adapters.vllm.identity import fingerprint_adapter
from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError, InvalidCallError
from kvstore.model.keys import KeyExtras
from kvstore.model.layout import KVLayout
from kvstore.tools.warm.prompts import Prompt, PromptError, Rejected, Tokenizer, tokens_of


class Lora(NamedTuple):
    """LoRA adapter: its name in requests, and the folder of its files."""

    name: str
    folder: Path

    @classmethod
    def parse(cls, text: str | None) -> Lora | None:
        """Read ``name=folder``, as in vLLM's ``--lora-modules``.

        Raises:
            ConfigError: the text has another form, or there is no such folder.
        """
        if text is None:
            return None
        name, mark, folder = text.partition("=")
        if not name or not mark or not Path(folder).is_dir():
            raise ConfigError(f"--lora is {text!r}: write name=folder, with the name that requests will use")
        return cls(name, Path(folder))


@dataclass(frozen=True)
class Sharing:
    """Inputs to the keys that all prompts of a run share, in addition to the model.

    Attributes:
        lora: name of the adapter, and fingerprint of its files.
        salt: ``cache_salt`` of prompts without one.
    """

    lora: tuple[str, str] | None = None
    salt: str | None = None

    @classmethod
    def of(cls, lora: Lora | None, salt: str | None) -> Sharing:
        """Make the inputs for an adapter, whose files are read, and a salt.

        Raises:
            ConfigError: the files cannot be identified.
        """
        return cls((lora.name, fingerprint_adapter(lora.folder)) if lora else None, salt or None)

    def extras(self, prompt: Prompt) -> KeyExtras:
        """Return the inputs to a prompt's keys other than its tokens."""
        return KeyExtras(lora=self.lora, cache_salt=prompt.salt or self.salt)


class Wanted(NamedTuple):
    """Prompt in the form that vLLM takes, with its chunks: the whole chunks, and the tail.

    Attributes:
        tokens: its token ids.
        salt: its ``cache_salt``; None for none.
        refs: its chunks, in order.
        trail: trail of the last chunk, because a longer chunk may hold it.
    """

    tokens: array[int]
    salt: str | None
    refs: list[ChunkRef]
    trail: bytes


def wanted(
    prompts: Iterable[Prompt | Rejected],
    layout: KVLayout,
    sharing: Sharing,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None = None,
    vocab_size: int | None = None,
    with_tail: bool = True,
) -> Iterator[Wanted | Rejected]:
    """Yield each prompt with its chunks; a malformed or too long one as ``Rejected``.

    Args:
        prompts: result of ``read_prompts``.
        layout: layout of the engine's chunks.
        sharing: inputs to the keys that the prompts share.
        tokenizer: the model's tokenizer.
        max_tokens: maximum tokens of a prompt; None for no limit.
        vocab_size: upper limit of token ids; None for no limit.
        with_tail: whether the engine stores tails that fill no chunk.
    """
    for prompt in prompts:
        if isinstance(prompt, Rejected):
            yield prompt
            continue
        try:
            tokens = tokens_of(prompt, tokenizer)
            _check(tokens, max_tokens, vocab_size)
            extras = sharing.extras(prompt)
            hasher = hash_tokens(layout, tokens, extras)
            refs = chunk_refs(hasher, with_tail=with_tail)
            trail = b"".join(hasher.trails(ref.prefix_key for ref in refs[-1:]).values())
            yield Wanted(array("I", tokens), extras.cache_salt, refs, trail)
        except (PromptError, InvalidCallError) as error:
            yield Rejected(prompt.where, str(error))


def _check(tokens: list[int], max_tokens: int | None, vocab_size: int | None) -> None:
    if max_tokens is not None and len(tokens) > max_tokens:
        raise PromptError(f"too long: {len(tokens):,} tokens, and the model takes {max_tokens:,}")
    if vocab_size is not None and max(tokens, default=0) >= vocab_size:
        raise PromptError(f"token id {max(tokens)} is not in the model's vocabulary of {vocab_size:,}")
