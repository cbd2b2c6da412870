"""Prompts are read as users write them; malformed ones are skipped and named by their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import ConfigError
from kvstore.tools.models import TINY, build_llama
from kvstore.tools.warm import prompts as prompts_tool
from kvstore.tools.warm.prompts import (
    Chat,
    Prompt,
    PromptError,
    Rejected,
    count_prompts,
    load_tokenizer,
    parse,
    read_prompts,
    tokens_of,
)

GOOD: list[tuple[object, Prompt]] = [
    ("a text", Prompt("here", "a text")),
    ([1, 2, 3], Prompt("here", (1, 2, 3))),
    ((1, 2), Prompt("here", (1, 2))),
    ({"prompt": "x", "cache_salt": "s"}, Prompt("here", "x", "s")),
    ({"prompt_token_ids": [5]}, Prompt("here", (5,))),
    ([{"role": "user", "content": "x"}], Prompt("here", Chat([{"role": "user", "content": "x"}]))),
    (
        {"messages": [{"role": "system", "content": "x"}], "tools": [{}], "add_generation_prompt": True},
        Prompt("here", Chat([{"role": "system", "content": "x"}], [{}], add_generation_prompt=True)),
    ),
]
BAD: list[tuple[object, str]] = [
    ("", "not empty"),
    ("  \n", "not empty"),
    ([], "not empty"),
    (None, "a prompt is"),
    (7, "a prompt is"),
    ([1, "2"], "integers"),
    ([1, -1], "integers"),
    ([True], "integers"),
    ([2**32], "integers"),
    ({}, "one of"),
    ({"prompt": "x", "messages": []}, "one of"),
    ({"promt": "x"}, "unknown field 'promt'"),
    ({"messages": []}, "at least one"),
    ({"messages": [{"content": "x"}]}, "role"),
    ({"messages": "x"}, "at least one"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "x", "tools": []}, "need messages"),
    ({"messages": [{"role": "user"}], "tools": "x"}, "tools must"),
    ({"messages": [{"role": "user"}], "add_generation_prompt": 1}, "true or false"),
]


@pytest.mark.parametrize(("value", "expected"), GOOD)
def test_what_is_a_prompt(value: object, expected: Prompt) -> None:
    assert parse(value, "here") == expected


@pytest.mark.parametrize(("value", "why"), BAD)
def test_what_is_none(value: object, why: str) -> None:
    with pytest.raises(PromptError, match=why):
        parse(value, "here")


def test_a_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = [json.dumps("first"), "", "{", '{"prompt": "last"}', "[1]"]
    file.write_bytes("\r\n".join(lines).encode() + b"\n\xff\xfe\n" + b"[" * 100_000)
    found = list(read_prompts(file))
    assert [item.where for item in found] == [f"{file}, line {number}" for number in (1, 3, 4, 5, 6, 7)]
    kinds = [type(item) for item in found]
    assert kinds == [Prompt, Rejected, Prompt, Prompt, Rejected, Rejected]
    whys = [item.why for item in found if isinstance(item, Rejected)]
    assert whys[1] == "not UTF-8"
    assert all(why.startswith("not JSON") for why in (whys[0], whys[2]))
    assert count_prompts(file) == 6


def test_lines_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in several pieces is one line; one that is too long is skipped, and the next one is read."""
    monkeypatch.setattr(prompts_tool, "_READ_BYTES", 7)
    monkeypatch.setattr(prompts_tool, "_MAX_PROMPT_BYTES", 50)
    file = tmp_path / "p.txt"
    file.write_text("a line of more than seven bytes\n" + "x" * 200 + "\nlast", encoding="utf-8")
    first, long, last = read_prompts(file, format_="lines")
    assert isinstance(first, Prompt)
    assert first.content == "a line of more than seven bytes"
    assert isinstance(long, Rejected)
    assert long.where.endswith("line 2")
    assert last == Prompt(f"{file}, line 3", "last")


def test_a_folder(tmp_path: Path) -> None:
    """Files are read in order of names; a text file is one prompt."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two\nlines", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('"one"\n"two"\n', encoding="utf-8")
    (tmp_path / "sub" / "c.md").write_text("# three", encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    found = [item.content for item in read_prompts(tmp_path) if isinstance(item, Prompt)]
    assert found == ["one", "two", "two\nlines", "# three"]
    assert count_prompts(tmp_path) == 4


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        read_prompts(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no"):
        read_prompts(tmp_path)


def test_tokens(tmp_path: Path) -> None:
    """Tokens are those that vLLM makes; a model without a chat template refuses chats."""
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(str(build_llama(tmp_path / "model", TINY)))
    assert tokens_of(Prompt("", "w1 w2"), tokenizer) == [1, 2]
    assert tokens_of(Prompt("", (7, 8)), tokenizer) == [7, 8]
    messages = [{"role": "user", "content": "w3"}]
    chat = Prompt("", Chat(messages))
    with pytest.raises(PromptError, match="chat template"):
        tokens_of(chat, tokenizer)
    template: Any = "{% for m in messages %}<s> {{ m.content }}{% endfor %}{% if add_generation_prompt %} w9{% endif %}"
    setattr(tokenizer, "chat_template", template)  # noqa: B010 - a field of transformers'
    assert tokens_of(chat, tokenizer) == [TINY.vocab - 3, 3]
    assert tokens_of(Prompt("", Chat(messages, add_generation_prompt=True)), tokenizer)[-1] == 9
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path))
