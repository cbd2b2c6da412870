"""Reading of prompts from files and from Python, and their tokens.

A ``*.jsonl`` file has one prompt per line: a string, a list of token ids, or an object with one of ``prompt`` (a
string), ``prompt_token_ids`` and ``messages`` (a chat). The object may also have ``cache_salt`` and, for a chat,
``tools`` and ``add_generation_prompt``. Any other file is a single prompt, or with the format ``lines`` one prompt per
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from kvstore.model.errors import ConfigError, KVStoreError

Format = Literal["auto", "jsonl", "lines", "text"]
FORMATS: tuple[Format, ...] = ("auto", "jsonl", "lines", "text")

_SUFFIXES = frozenset({".jsonl", ".txt", ".md"})
_READ_BYTES = 1 << 20
_MAX_PROMPT_BYTES = 64 << 20  # a token has several bytes, so no model accepts such a prompt
_FIELDS = frozenset({"prompt", "prompt_token_ids", "messages", "cache_salt", "tools", "add_generation_prompt"})


def check_format(text: str) -> Format:
    """Return a format of prompt files by its name.

    Raises:
        ConfigError: there is no such format.
    """
    found = next((name for name in FORMATS if name == text), None)
    if found is None:
        raise ConfigError(f"--format is {text!r}: it is one of {', '.join(FORMATS)}")
    return found


class PromptError(KVStoreError, ValueError):
    """A prompt is malformed; the message gives the reason without quoting the prompt."""


class Chat(NamedTuple):
    """Messages for the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = False


@dataclass(frozen=True)
class Prompt:
    """Prompt and its origin: file and line, or its number."""

    where: str
    content: str | tuple[int, ...] | Chat
    salt: str | None = None


@dataclass(frozen=True)
class Rejected:
    """Skipped prompt: its origin, and the reason."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class Tokenizer(Protocol):
    """Methods of a tokenizer of transformers or vLLM that are used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text."""

    def apply_chat_template(self, conversation: Any, **keywords: Any) -> Any:  # noqa: ANN401 - transformers' own
        """Return the text of a chat."""


def parse(value: object, where: str) -> Prompt:
    """Parse a prompt from a line of JSON or a Python object.

    Raises:
        PromptError: the value is not a prompt.
    """
    if isinstance(value, Mapping):
        return _parse_fields(value, where)
    if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        return Prompt(where, _chat({"messages": value}))
    return Prompt(where, _text_or_tokens(value))


def tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that vLLM makes of a prompt; the model's template adds the special tokens of a chat.

    Raises:
        PromptError: the model has no chat template, or the template refuses the messages.
    """
    content = prompt.content
    if isinstance(content, str):
        return list(tokenizer.encode(content, add_special_tokens=True))
    if not isinstance(content, Chat):
        return list(content)
    from jinja2 import TemplateError  # noqa: PLC0415 - comes with transformers

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in content.messages],
            tools=list(content.tools) if content.tools else None,
            add_generation_prompt=content.add_generation_prompt,
            tokenize=False,
        )
    except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
        raise PromptError(f"the chat template cannot be applied: {type(error).__name__}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of a model, without vLLM.

    Raises:
        ConfigError: transformers is not installed, or the model has no tokenizer.
    """
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - heavy, and otherwise only vLLM needs it
    except ImportError as error:
        raise ConfigError(
            "text prompts need transformers, which comes with vLLM: pip install 'vllm-kvstore[vllm]'"
        ) from error
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer of {model} cannot be loaded: name the model's folder") from error
    return tokenizer


def read_prompts(path: Path, *, format_: Format = "auto") -> Iterator[Prompt | Rejected]:
    """Read the prompts in a file, or in all ``.jsonl``, ``.txt`` and ``.md`` files below a folder, sorted by name.

    Files are read as the iterator advances. Malformed prompts and unreadable files are returned as ``Rejected``.

    Raises:
        ConfigError: there is no such file or folder, or the folder has no prompts.
    """
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not paths:
            raise ConfigError(f"{path} has no {', '.join(sorted(_SUFFIXES))} files")
    elif path.is_file():
        paths = [path]
    else:
        raise ConfigError(f"there is no {path}: name a file of prompts, or a folder of them")
    return _read_all(paths, format_)


def count_prompts(path: Path, *, format_: Format = "auto") -> int:
    """Estimate the prompts of ``read_prompts``: empty lines count, a last line without a newline does not."""
    paths = [file for file in path.rglob("*") if file.suffix in _SUFFIXES] if path.is_dir() else [path]
    total = 0
    for file in paths:
        if _kind(file, format_) == "text":
            total += 1
            continue
        with suppress(OSError), file.open("rb") as opened:
            total += sum(block.count(b"\n") for block in iter(lambda opened=opened: opened.read(_READ_BYTES), b""))  # type: ignore[misc]
    return total


def _read_all(paths: Iterable[Path], format_: Format) -> Iterator[Prompt | Rejected]:
    for path in paths:
        kind = _kind(path, format_)
        try:
            if kind == "text":
                yield _whole_file(path)
                continue
            for number, line in _lines(path):
                where = f"{path}, line {number}"
                if line is None:
                    yield Rejected(where, f"longer than {_MAX_PROMPT_BYTES >> 20} MiB")
                elif line.strip():
                    yield _parsed(line, where, is_json=kind == "jsonl")
        except OSError as error:
            yield Rejected(str(path), f"cannot be read: {error.strerror}")


def _kind(path: Path, format_: Format) -> Format:
    return format_ if format_ != "auto" else ("jsonl" if path.suffix == ".jsonl" else "text")


def _whole_file(path: Path) -> Prompt | Rejected:
    with path.open("rb") as file:
        raw = file.read(_MAX_PROMPT_BYTES + 1)
    if len(raw) > _MAX_PROMPT_BYTES:
        return Rejected(str(path), f"longer than {_MAX_PROMPT_BYTES >> 20} MiB")
    return _parsed(raw, str(path), is_json=False)


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a file with their numbers; None for a line that is too long."""
    number, rest, is_too_long = 1, b"", False
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield number, None if is_too_long else line
                number, is_too_long = number + 1, False
            if len(rest) > _MAX_PROMPT_BYTES:
                rest, is_too_long = b"", True
    if rest or is_too_long:
        yield number, None if is_too_long else rest


def _parsed(raw: bytes, where: str, *, is_json: bool) -> Prompt | Rejected:
    try:
        text = raw.decode("utf-8").removesuffix("\r")
        return parse(json.loads(text) if is_json else text, where)
    except UnicodeDecodeError:
        return Rejected(where, "not UTF-8")
    except (json.JSONDecodeError, RecursionError) as error:
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return Rejected(where, f"not JSON{place}")
    except PromptError as error:
        return Rejected(where, str(error))


def _parse_fields(value: Mapping[Any, Any], where: str) -> Prompt:
    unknown = sorted(str(name) for name in value.keys() - _FIELDS)
    if unknown:
        raise PromptError(f"unknown field {unknown[0][:40]!r}: there are {', '.join(sorted(_FIELDS))}")
    kinds = [name for name in ("prompt", "prompt_token_ids", "messages") if name in value]
    if len(kinds) != 1:
        raise PromptError("it needs one of prompt, prompt_token_ids and messages")
    salt = value.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise PromptError("cache_salt must be a string that is not empty")
    if kinds == ["messages"]:
        return Prompt(where, _chat(value), salt)
    if "tools" in value or "add_generation_prompt" in value:
        raise PromptError("tools and add_generation_prompt need messages")
    return Prompt(where, _text_or_tokens(value[kinds[0]]), salt)


def _chat(value: Mapping[str, Any]) -> Chat:
    messages, tools = value["messages"], value.get("tools")
    add = value.get("add_generation_prompt", False)
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError("messages must be a list of at least one")
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
        raise PromptError("every message must be an object with a role")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise PromptError("tools must be a list of objects")
    if not isinstance(add, bool):
        raise PromptError("add_generation_prompt must be true or false")
    return Chat(messages, tools, add)


def _text_or_tokens(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32 - 1 for item in value):
            return tuple(value)
        raise PromptError("token ids must be integers of 0 or more")
    raise PromptError("a prompt is a text, a list of token ids, or an object with messages; and it is not empty")
