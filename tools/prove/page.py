"""A certificate as one page without scripts and other hosts' files, in the style of the cache server's status page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

from kvstore.tools.console import size
from kvstore.tools.prove.situations import Verdict

_STYLE: Final = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_OWN_STYLE: Final = """
.sign { font-size: 28px; font-weight: 700; } td { vertical-align: top; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
"""
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
    style = _STYLE.findall(files("kvstore.tools.serve").joinpath("status.html").read_text("utf-8"))[0]
    sections = [
        _section("Situations", _situations(body["situations"]) + _note(body["vllm_own"]["tolerance"])),
        _section("Not part of this proof", _list(body["left_out"])),
        _section("Versions", _tree(body["versions"])),
        _section("Machine", _tree(body["machine"])),
        _section("vLLM", _tree(body["vllm"])),
        _section("Prompts", _tree(body["prompts"])),
        _section(
            "kvstore's configuration", f"<details><summary>all keys</summary>{_tree(body['configuration'])}</details>"
        ),
        _section("Changed for the proof", _tree(body["changed_for_the_proof"])),
        _section("Certificate", _tree({"sha256": sealed["sha256"], "signature": signed})),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>kvstore: {escape(verdict)}</title>
<style>{style}{_OWN_STYLE}</style>
</head>
<body>
<header>
  <h1>kvstore prove</h1>
  <span class="sign {_class_of(verdict)}">{escape(_SAID[verdict])}</span>
  <span class="soft">{escape(str(body["made_at"]))}</span>
</header>
<main>
{"".join(sections)}</main>
</body>
</html>
"""


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
    return _table(lines)


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
    return _table(lines)


def _list(lines: Iterable[str]) -> str:
    return _table([f"<td>{escape(line)}</td>" for line in lines] or ["<td>nothing that is configured</td>"])


def _table(lines: Iterable[str]) -> str:
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def _section(title: str, content: str) -> str:
    return f'<section class="wide"><h2>{escape(title)}</h2><div class="scroll">{content}</div></section>\n'


def _class_of(verdict: Verdict) -> str:
    return "good" if verdict is Verdict.PROVEN else "soft" if verdict is Verdict.NOT_PROVEN else "bad"
