"""The lint for English."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.tools.dev.english import docstring_problems, problems, prose_problems


@pytest.mark.parametrize("word", ["What", "Whether", "How", "Which", "Where", "Who"])
def test_a_docstring_does_not_begin_with_a_question_word(word: str) -> None:
    source = f'"""A module."""\n\ndef ask():\n    """{word} it is."""\n'
    assert [line for line, _ in docstring_problems(source)] == [4]
    assert not list(docstring_problems(source.replace(word, "Tell if")))


def test_a_word_that_only_begins_alike_is_none() -> None:
    assert not list(docstring_problems('"""Whole chunks."""'))
    assert [line for line, _ in docstring_problems('"""How: a class and a module are asked, too."""')] == [1]


def test_a_text_below_an_attribute_is_one() -> None:
    source = 'class Keys:\n    """Keys."""\n\n    ttl_s: float = 1.0\n    """How long it lasts."""\n'
    assert [line for line, _ in docstring_problems(source)] == [5]


@pytest.mark.parametrize(
    ("line", "is_good"),
    [
        ("One colon: one semicolon; that is enough.", True),
        ("One: two: three.", False),
        ("One; two; three.", False),
        ("- `term`, another: what it is: more; that is enough.", True),
        ("- `term`: one: two: three.", False),
        ("`a: b: c`, [x](http://x:1), http://y:2: all right", True),
        ("| a: b | c: d |", True),
        ("```\na: b: c\n```", True),
    ],
)
def test_a_line_of_prose_has_one_colon_and_one_semicolon(line: str, *, is_good: bool) -> None:
    assert (not list(prose_problems(line))) is is_good


def test_a_problem_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "one.py").write_text('"""How it goes."""\n')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("Fine.\nA: b: c.\n")
    first, second = problems(tmp_path)
    assert first.startswith("kvstore/one.py:1: a docstring begins with 'How'")
    assert second.startswith("docs/page.md:2: 2 colons in a line")
