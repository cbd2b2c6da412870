"""A certificate as one page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from kvstore.tools.console import size
from kvstore.tools.prove.situations import Verdict
from kvstore.tools.reportpage import document, section, table

_SAID: Final = {
    Verdict.PROVEN: "Proven: with kvstore vLLM answered as without it",
    Verdict.NOT_PROVEN: "Not proven: something did not come about, and nothing differed",
    Verdict.FAILED: "Failed: requests ended without an answer",
    Verdict.DIFFERS: "Wrong: outputs differ more than vLLM from itself",
}


def page_of(sealed: Mapping[str, Any], signed: str) -> str:
    """Return the page of a certificate; ``signed`` says by whom it is signed."""
    body = sealed["certificate"]
    verdict = Verdict(body["verdict"])
    sections = [
        section("Situations", _situations(body["situations"]) + _note(body["vllm_own"]["tolerance"])),
        section("Not part of this proof", _list(body["left_out"])),
        section("Versions", _tree(body["versions"])),
        section("Machine", _tree(body["machine"])),
        section("vLLM", _tree(body["vllm"])),
        section("Prompts", _tree(body["prompts"])),
        section(
            "kvstore's configuration", f"<details><summary>all keys</summary>{_tree(body['configuration'])}</details>"
        ),
        section("Changed for the proof", _tree(body["changed_for_the_proof"])),
        section("Certificate", _tree({"sha256": sealed["sha256"], "signature": signed})),
    ]
    said = (_SAID[verdict], _class_of(verdict))
    return document("kvstore prove", f"kvstore: {verdict}", said, str(body["made_at"]), sections)


def _situations(found: Iterable[Mapping[str, Any]]) -> str:
    heads = ("situation", "verdict", "tokens not computed", "read", "outputs")
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for one in found:
        verdict, moved = Verdict(one["verdict"]), one["moved_bytes"]
        read = [f"{tier} {size(moved.get(f'{tier}|load', 0))}" for tier in one["hit_tokens"]]
        cells = (
            f'<b>{escape(one["situation"])}</b><br><span class="soft">{escape(one["about"])}</span>',
            f'<span class="{_class_of(verdict)}">{escape(verdict)}</span>',
            f"{one['cached_tokens']:,} of {one['prompt_tokens']:,}",
            escape(", ".join(read)),
            escape(one["words"]),
        )
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return table(lines)


def _note(tolerance: float | str) -> str:
    """Return the sentence about the tolerance, which is a text if it is infinite."""
    shown = tolerance if isinstance(tolerance, str) else f"{tolerance:.2g}"
    text = f"vLLM's own difference: logprobs, and two best ones that swap, may differ by {shown}."
    return f'<p class="soft">{escape(text)}</p>'


def _tree(tree: Mapping[str, Any]) -> str:
    lines = []
    for name, value in tree.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f'<td class="soft">{escape(name)}</td><td><pre>{escape(shown)}</pre></td>')
    return table(lines)


def _list(lines: Iterable[str]) -> str:
    return table([f"<td>{escape(line)}</td>" for line in lines] or ["<td>nothing that is configured</td>"])


def _class_of(verdict: Verdict) -> str:
    return "good" if verdict is Verdict.PROVEN else "soft" if verdict is Verdict.NOT_PROVEN else "bad"
