"""Table of the demonstration's measurements."""

from __future__ import annotations

from rich.table import Column, Table

from kvstore.tools.demo.run import DemoResult


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
