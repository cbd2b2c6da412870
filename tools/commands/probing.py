"""Command ``kvstore probe``, which checks that a running vLLM finds chunks it has stored."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.tools.console import FAILED, Answer

if TYPE_CHECKING:
    from kvstore.tools.probe.run import ProbeReport


def probe(
    *,
    url: Annotated[str, typer.Option(help="Address of a running vLLM.")] = "http://127.0.0.1:8000",
    tokens: Annotated[int, typer.Option(help="Length of the made-up prompt.")] = 2000,
    model: Annotated[str | None, typer.Option(help="The server's name for its model; by default the first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="API key, if the server needs one.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="How long each answer may take.")] = 60.0,
) -> Answer:
    """Send a made-up prompt twice to a running vLLM, and show what kvstore supplied the second time.

    vLLM's own prefix cache is kept out of the way, and nobody's is emptied. Exits with 1 if nothing was found, and says
    why; with 2 if no vLLM answers, or it refuses.
    """
    from kvstore.tools.probe.run import probe as run  # noqa: PLC0415 - an extra

    report = run(url, tokens=tokens, model=model, api_key=api_key, timeout_s=timeout_s)
    return Answer(asdict(report), _lines(report), 0 if report.found_tokens else FAILED, report.notes)


def _lines(report: ProbeReport) -> list[str]:
    lines = [f"model: {report.model}", f"prompt: {report.prompt_tokens:,} made-up tokens"]
    if report.cold_ttft_s is not None and report.warm_ttft_s is not None:
        lines.append(f"cold TTFT: {report.cold_ttft_s:.3f} s")
        lines.append(f"warm TTFT: {report.warm_ttft_s:.3f} s")
        tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in report.tiers.items())
        lines.append(f"found: {report.found_tokens:,} tokens{f' ({tiers})' if tiers and report.found_tokens else ''}")
    if report.reason:
        lines += [f"no hit: {report.reason}", f"what to do: {report.remedy}"]
    return lines
