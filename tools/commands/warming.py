"""``kvstore warm``: the KV of known prompts, computed before anybody asks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools.console import FAILED, AsJson, errors, give_up, progress, size

INTERRUPTED = 130
_SHOWN_SKIPPED = 50


def warm(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Option(help="As vLLM takes it.")],
    prompts: Annotated[Path, typer.Option(help="A .jsonl or text file, or a folder of them.")],
    config: Annotated[Path | None, typer.Option(help="The server's YAML file; else KVSTORE_CONFIG_FILE's.")] = None,
    prompt_format: Annotated[str, typer.Option("--format", help="auto, jsonl, lines or text.")] = "auto",
    lora: Annotated[str | None, typer.Option(help="name=folder of an adapter.")] = None,
    salt: Annotated[str | None, typer.Option(help="cache_salt of prompts that have none.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the KV of prompts with vLLM, without a server, and store it on disk or in Redis.

    What is stored already is skipped before it is computed, so a run that was interrupted is started again. Flags of
    ``vllm serve`` follow behind --: give those with which the server runs.

    Exits with 0 if everything is stored; with 1 if a prompt was skipped (its line is told) or a chunk could not be
    stored; with 2 if the configuration cannot be used; with 130 if interrupted, after what was computed is stored.
    """
    from kvstore.tools.warm.prompts import check_format, count_prompts, read_prompts  # noqa: PLC0415
    from kvstore.tools.warm.wanted import Lora  # noqa: PLC0415
    from kvstore.tools.warm.warming import warm as run  # noqa: PLC0415

    try:
        format_, adapter = check_format(prompt_format), Lora.parse(lora)
        found = read_prompts(prompts, format_=format_)
        with _stdout_aside(), _stopped_by_signals() as is_stopped:
            report = run(
                model,
                found,
                config=config,
                lora=(adapter.name, adapter.folder) if adapter else None,
                salt=salt,
                engine_args=_engine_args(context.args),
                progress=True,
                total=count_prompts(prompts, format_=format_),
                should_stop=is_stopped.is_set,
            )
    except KVStoreError as error:
        give_up(error)
    for item in report.skipped[:_SHOWN_SKIPPED]:
        errors().print(f"skipped: {item.where}: {item.why}")
    if len(report.skipped) > _SHOWN_SKIPPED:
        errors().print(f"skipped: {len(report.skipped) - _SHOWN_SKIPPED} more; --json names all")
    if as_json:
        print(json.dumps({**asdict(report), "skipped": [item._asdict() for item in report.skipped]}))
    else:
        print(f"{report.prompts:,} prompts stored, {report.prompts_present:,} of them before; {report.tokens:,} tokens")
        print(
            f"{report.chunks_stored:,} chunks stored ({size(report.bytes_stored)}), {report.chunks_present:,} there "
            f"already, {report.chunks_failed:,} failed; {report.tokens_computed:,} tokens computed in "
            f"{report.seconds:.1f} s"
        )
    if report.interrupted:
        errors().print("interrupted: start it again to go on")
        raise typer.Exit(INTERRUPTED)
    if not report.is_complete:
        raise typer.Exit(FAILED)


def prefetch(
    *,
    model: Annotated[str, typer.Option(help="As the server calls it; for an adapter, the adapter's name.")],
    prompts: Annotated[Path, typer.Option(help="A .jsonl or text file, or a folder of them.")],
    server: Annotated[str, typer.Option(help="Address of the running vLLM.")] = "http://127.0.0.1:8000",
    prompt_format: Annotated[str, typer.Option("--format", help="auto, jsonl, lines or text.")] = "auto",
    salt: Annotated[str | None, typer.Option(help="cache_salt of prompts that have none.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="If the server wants one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let a running vLLM load prompts from disk or Redis into memory, before users ask for them.

    Each prompt is sent to the server for one token; what is stored nowhere is computed. Exits with 1 if a prompt was
    refused, with 2 if the server does not answer, with 130 if interrupted.
    """
    from kvstore.tools.warm.prompts import check_format, count_prompts, read_prompts  # noqa: PLC0415

    try:
        from kvstore.tools.prefetch import prefetch as run  # noqa: PLC0415 - an extra

        format_ = check_format(prompt_format)
        found = read_prompts(prompts, format_=format_)
        with progress("tokens") as bar, _stopped_by_signals() as is_stopped:
            task = bar.add_task("prefetching", total=count_prompts(prompts, format_=format_), rate="0")
            report = run(
                server,
                model,
                found,
                salt=salt,
                api_key=api_key,
                tick=lambda so_far: bar.update(task, advance=1, rate=f"{so_far.tokens / so_far.seconds:,.0f}"),
                should_stop=is_stopped.is_set,
            )
    except (KVStoreError, ImportError) as error:
        give_up(error)
    if as_json:
        print(json.dumps({**asdict(report), "refused": [item._asdict() for item in report.refused]}))
    else:
        for item in report.refused[:_SHOWN_SKIPPED]:
            errors().print(f"refused: {item.where}: {item.why}")
        print(
            f"{report.prompts:,} prompts of {report.tokens:,} tokens; {report.tokens_loaded:,} tokens loaded in "
            f"{report.seconds:.1f} s"
        )
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.is_complete:
        raise typer.Exit(FAILED)


def _engine_args(arguments: list[str]) -> dict[str, object]:
    """What follows behind ``--``.

    Raises:
        ConfigError: vLLM is not installed, or does not have such a flag.
    """
    try:
        from kvstore.adapters.vllm.offline.engine import parse_engine_args  # noqa: PLC0415 - imports vLLM
    except ImportError as error:
        raise ConfigError(f"warming needs vLLM: pip install 'vllm-kvstore[vllm]' ({error})") from error
    return parse_engine_args(arguments)


@contextmanager
def _stdout_aside() -> Iterator[None]:
    """Let all that vLLM and its libraries print go to standard error, so that standard output holds the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Let the first SIGINT or SIGTERM end the run after the batch under way; the second one counts as ever."""
    is_stopped = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]

    def stop(_number: int, _frame: object) -> None:
        is_stopped.set()
        restore()

    def restore() -> None:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield is_stopped
    finally:
        restore()
