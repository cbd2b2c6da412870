"""Reports as one page without scripts and other hosts' files, in the style of the cache server's status page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Final

_STYLE: Final = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_OWN_STYLE: Final = """
.sign { font-size: 28px; font-weight: 700; } td { vertical-align: top; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.plot svg { height: auto; max-width: 900px; background: #fff; }
"""


def document(command: str, title: str, sign: tuple[str, str], note: str, sections: Iterable[str]) -> str:
    """Return a page: ``sign`` is its statement, and its class, ``good``, ``soft`` or ``bad``."""
    style = _STYLE.findall(files("kvstore.tools.serve").joinpath("status.html").read_text("utf-8"))[0]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{style}{_OWN_STYLE}</style>
</head>
<body>
<header>
  <h1>{escape(command)}</h1>
  <span class="sign {sign[1]}">{escape(sign[0])}</span>
  <span class="soft">{escape(note)}</span>
</header>
<main>
{"".join(sections)}</main>
</body>
</html>
"""


def section(title: str, content: str) -> str:
    """Return a section with content in HTML."""
    return f'<section class="wide"><h2>{escape(title)}</h2><div class="scroll">{content}</div></section>\n'


def table(lines: Iterable[str]) -> str:
    """Return a table of lines of cells in HTML."""
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"
