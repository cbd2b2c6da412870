"""Output of the demonstration: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from kvstore.tools.demo.run import DemoResult

_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")


@contextlib.contextmanager
def stage_progress(console: Console, stages: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the text of each stage when it begins."""
    begin = time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(f"[{time.monotonic() - begin:6.1f} s] {text}", markup=False, highlight=False)
        return
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=stages, completed=-1, visible=False)
        yield lambda text: progress.update(task, description=text, advance=1, visible=True)


def result_table(result: DemoResult) -> Table:
    """Return a table of the measurements, one per row."""
    columns = Column(style="bold"), Column(justify="right")
    table = Table(*columns, title="One prompt, before and after a restart", show_header=False)
    table.add_row("prompt tokens", f"{result.prompt_tokens:,}")
    table.add_row("cold TTFT", f"{result.cold_ttft_s:.3f} s")
    table.add_row("warm TTFT after restart", f"{result.warm_ttft_s:.3f} s")
    table.add_row("warm / cold", f"{result.ratio:.3f}")
    table.add_row("tokens loaded (vLLM's count)", f"{result.loaded_tokens:,}")
    table.add_row("bytes on disk", f"{result.disk_bytes:,}")
    table.add_row(f"outputs identical ({result.output_tokens} tokens)", "yes" if result.outputs_identical else "NO")
    return table


def log_excerpt(log: Path, lines: int = 20) -> str:
    """Return the end of a server's log, with earlier errors above it, because vLLM logs a cause before its effects."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    above, end = text.splitlines()[:-lines], text.splitlines()[-lines:]
    causes = [line for line in above if _ERROR.search(line) and " WARNING " not in line][:5]
    return "\n".join([*causes, "..." if causes else "", *end]).strip()
