"""Prompts of a proof: made-up ones, the same every time, or a user's own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.tools.probe.settling import END_TOKEN_ID, LOWEST_TOKEN_ID
from kvstore.tools.prove.outputs import digest
from kvstore.tools.warm.prompts import Chat, Rejected, load_tokenizer, read_prompts, tokens_of

LENGTHS: Final = (1511, 701, 293)
"""Tokens of the made-up prompts: no whole number of blocks, so that one token more than the last block is computed."""
OUTPUT_TOKENS: Final = 16
_RESERVED_TOKENS: Final = OUTPUT_TOKENS + 8  # of the model's length; a server may add some to a prompt

Content = str | list[int]


@dataclass(frozen=True)
class Prompts:
    """Prompts as vLLM takes them.

    Attributes:
        contents: texts, or token ids.
        built_in: they are made up, and so no secret.
    """

    contents: tuple[Content, ...]
    built_in: bool

    def described(self) -> dict[str, object]:
        """Return the certificate's part about them, which quotes none."""
        return {"built_in": self.built_in, "count": len(self.contents), "sha256": digest(list(self.contents))}


def made_up_prompts(max_model_tokens: int | None) -> Prompts:
    """Return the built-in prompts, cut to the model's length."""
    most = max(1, max_model_tokens - _RESERVED_TOKENS) if max_model_tokens else LENGTHS[0]
    contents = []
    for seed, length in enumerate(LENGTHS):
        ids = random.Random(seed).choices(range(LOWEST_TOKEN_ID, END_TOKEN_ID), k=length)  # noqa: S311 - no secret
        contents.append(ids[:most])
    return Prompts(tuple(contents), built_in=True)


def read_own(path: Path, model: str) -> Prompts:
    """Read a user's prompts; their salts do not count.

    Raises:
        ConfigError: there is no prompt, one is malformed, or the model's chat template cannot be applied.
        PromptError: the chat template refuses the messages of a prompt.
    """
    found = list(read_prompts(path))
    contents: list[Content] = []
    for prompt in found:
        if isinstance(prompt, Rejected):
            raise ConfigError(f"{prompt}")
        content = prompt.content
        if isinstance(content, Chat):
            content = tuple(tokens_of(prompt, load_tokenizer(model)))
        contents.append(content if isinstance(content, str) else list(content))
    if not contents:
        raise ConfigError(f"{path} has no prompts")
    return Prompts(tuple(contents), built_in=False)
