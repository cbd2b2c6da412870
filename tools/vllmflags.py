"""Flags of ``vllm serve``, parsed without vLLM, whose parser takes tens of seconds to import.

Only flags that concern a cache are parsed. All others are ignored, valid or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.adapters.vllm.flag import TRANSFER_FLAG
from kvstore.config.yamltext import YamlTextError, parse_yaml
from kvstore.model.errors import ConfigError
from kvstore.tools.workers import Workers

_CONFIG_FLAG: Final = "--config"
_SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
}
_NUMBERS: Final = {
    **dict.fromkeys(_SHORT.values(), int),
    "--block-size": int,
    "--shutdown-timeout": float,
    "--gpu-memory-utilization": float,
    "--kv-offloading-size": float,
}
_MOST_WORKERS: Final = 1024
_TEXTS: Final = {"--model", "--load-format", _CONFIG_FLAG, TRANSFER_FLAG}
_SWITCHES: Final = {"--enable-prompt-embeds", "--enable-sleep-mode", "--async-scheduling", "--enable-prefix-caching"}


@dataclass(frozen=True)
class ServeFlags:
    """Parsed flags.

    Attributes:
        given: value of each flag that is known here: a number, a text, or whether a switch is on.
        transfer: value of ``--kv-transfer-config``; None if it is missing or cannot be read.
        problems: flags whose values cannot be read, one line each.
    """

    given: Mapping[str, Any]
    transfer: Mapping[str, Any] | None
    problems: tuple[str, ...]

    @property
    def model(self) -> str | None:
        """Model name or folder, as passed to vLLM; None if it was not given."""
        return self.given.get("--model")

    @property
    def workers(self) -> Workers:
        """Workers on this machine."""
        per_replica = self.number("-tp") * self.number("-pp")
        if _SHORT["-dpn"] in self.given:  # one replica per vLLM, behind a load balancer
            return Workers(per_replica)
        return Workers(per_replica, self.given.get(_SHORT["-dpl"]) or self.number("-dp"))

    def number(self, short: str) -> int:
        """Return the value of a flag of parallelism, by its short name; 1 if it was not given."""
        return max(1, int(self.given.get(_SHORT[short], 1)))


def parse_serve(arguments: Sequence[str]) -> ServeFlags:
    """Parse the arguments of ``vllm serve``; these two words may come first.

    As in vLLM, the last of two equal flags wins, and dotted parts replace the whole JSON value.

    Raises:
        ConfigError: the file that ``--config`` names cannot be read.
    """
    words = list(arguments)
    if words[:2] == ["vllm", "serve"]:
        del words[:2]
    given: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    problems: list[str] = []
    if words and not words[0].startswith("-"):
        given["--model"] = words.pop(0)
    if any(word.startswith(f"{_CONFIG_FLAG}=") for word in words):
        problems.append(f"{_CONFIG_FLAG}=FILE: vLLM ignores it: write {_CONFIG_FLAG} FILE")
        words = [word for word in words if not word.startswith(f"{_CONFIG_FLAG}=")]
    pairs = list(_pairs(words))
    file = next((value for name, value in pairs if name == _CONFIG_FLAG), None)
    if file is not None:
        pairs = [*_pairs(_words_in(Path(file))), *pairs]
    for name, value in pairs:
        try:
            _take(name, value, given, parts)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    transfer = _transfer(given.pop(TRANSFER_FLAG, None), parts, problems)
    return ServeFlags(given, transfer, tuple(problems))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag in vLLM's spelling with its value, which is None for a switch."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            continue  # a further value of an unknown flag
        name, mark, value = word.partition("=")
        name = spelled(name)
        if mark:
            yield name, value
        elif name in _SWITCHES or name.startswith("--no-") or position == len(words) or is_flag(words[position]):
            yield name, None
        else:
            yield name, words[position]
            position += 1


def is_flag(word: str) -> bool:
    """Tell if a word is a flag, and no value of one."""
    return word.startswith("-") and not word[1:2].isdecimal()


def spelled(name: str) -> str:
    """Return the long name of a flag, with dashes for underscores up to the first dot."""
    head, dot, rest = name.partition(".")
    return _SHORT.get(name, head.replace("_", "-") + dot + rest)


def _take(name: str, value: str | None, given: dict[str, Any], parts: dict[str, Any]) -> None:
    """Parse one flag into ``given``, or into ``parts`` of the transfer configuration.

    Raises:
        ValueError: the value is missing or invalid; the message says what it must be.
    """
    positive = name.replace("--no-", "--", 1)
    if positive in _SWITCHES:
        given[positive] = positive == name
    elif name.startswith(f"{TRANSFER_FLAG}."):
        if value is None:
            raise ValueError("needs a value")
        _put(parts, name.split(".")[1:], value)
    elif name in _TEXTS:
        if value is None:
            raise ValueError("needs a value")
        given[name] = value
    elif name in _NUMBERS:
        try:
            number = _NUMBERS[name](value or "")
        except ValueError as error:
            raise ValueError(f"must be a number, not {value!r}") from error
        if name in _SHORT.values() and number > _MOST_WORKERS:
            raise ValueError(f"must be at most {_MOST_WORKERS}, not {value}")
        given[name] = number


def _put(tree: dict[str, Any], path: Sequence[str], text: str) -> None:
    """Put a value at its dotted path, as JSON if it parses, else as text; a trailing plus sign appends to a list."""
    *above, last = path
    for name in above:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name} has a value already")  # noqa: TRY004 - of what the user wrote
        tree = inner
    if last.endswith("+"):
        before = tree.get(last[:-1], [])
        tree[last[:-1]] = [*(before if isinstance(before, list) else ()), *text.split(",")]
        return
    try:
        tree[last] = json.loads(text)
    except (ValueError, RecursionError):
        tree[last] = text


def _transfer(text: str | None, parts: dict[str, Any], problems: list[str]) -> Mapping[str, Any] | None:
    if parts:
        if text is not None:
            problems.append(
                f"{TRANSFER_FLAG}: given as JSON and in parts with dots, of which vLLM takes the parts only"
            )
        return parts
    if text is None:
        return None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{TRANSFER_FLAG}: is not JSON: {error}")
        return None
    if not isinstance(tree, dict):
        problems.append(f"{TRANSFER_FLAG}: must be an object: {{...}}")
        return None
    return tree


def _words_in(path: Path) -> list[str]:
    """Return the flags in a vLLM configuration file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        tree = parse_yaml(path.read_bytes()).value
    except (OSError, YamlTextError) as error:
        raise ConfigError(f"vLLM's --config {path} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"vLLM's --config {path} must hold `flag: value` lines")
    words = []
    for name, value in tree.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict | list) else value}")
    return words
