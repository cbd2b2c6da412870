"""Commands ``kvstore warm`` and ``kvstore prefetch``, which compute or load the KV of known prompts in advance."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.model.errors import ConfigError
from kvstore.tools.commands.options import ConfigFile, Lora, PromptFiles, PromptFormat, Salt
from kvstore.tools.console import FAILED, Answer, errors, progress, size, some
from kvstore.tools.interrupts import INTERRUPTED, interruptible

if TYPE_CHECKING:
    from kvstore.tools.prefetch import PrefetchReport
    from kvstore.tools.warm.warming import WarmReport

_FINISHING_BATCH = "finishing the batch under way; what is stored stays"
_FINISHING_PROMPT = "finishing the prompt under way"


def warm(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Option(help="Model, as vLLM takes it.")],
    prompts: PromptFiles,
    config: ConfigFile = None,
    prompt_format: PromptFormat = "auto",
    lora: Lora = None,
    salt: Salt = None,
) -> Answer:
    """Compute the KV of prompts with vLLM, without a server, and store it on disk or in Redis.

    What is already stored is skipped before it is computed: start an interrupted run again to complete it. Put the
    flags of ``vllm serve`` with which the server runs behind --.

    Exits with 0 if everything is stored; with 1 if a prompt was skipped (its line is printed) or a chunk could not be
    stored; with 2 if the configuration cannot be used; with 130 if interrupted, after storing what was computed.
    """
    from kvstore.tools.warm import wanted  # noqa: PLC0415
    from kvstore.tools.warm.prompts import check_format, count_prompts, read_prompts  # noqa: PLC0415
    from kvstore.tools.warm.warming import warm as run  # noqa: PLC0415

    format_, adapter = check_format(prompt_format), wanted.Lora.parse(lora)
    _require_free(config, context.args)
    found = read_prompts(prompts, format_=format_)
    with _stdout_aside(), interruptible(_FINISHING_BATCH) as should_stop:
        report = run(
            model,
            found,
            config=config,
            lora=adapter,
            salt=salt,
            engine_args=_engine_args(context.args),
            progress=True,
            total=count_prompts(prompts, format_=format_),
            should_stop=should_stop,
        )
    for line in some(report.skipped, "skipped"):
        errors().print(line)
    if report.interrupted:
        errors().print("interrupted: start it again to go on")
    text = [
        f"{report.prompts:,} prompts stored, {report.prompts_present:,} of them before; {report.tokens:,} tokens",
        (
            f"{report.chunks_stored:,} chunks stored ({size(report.bytes_stored)}), {report.chunks_present:,} there "
            f"already, {report.chunks_failed:,} failed; {report.tokens_computed:,} tokens computed in "
            f"{report.seconds:.1f} s"
        ),
    ]
    return Answer(asdict(report), text, _exit_code(report))


def prefetch(
    *,
    model: Annotated[str, typer.Option(help="Model, by the server's name for it; for an adapter, the adapter's name.")],
    prompts: PromptFiles,
    server: Annotated[str, typer.Option(help="Address of the running vLLM.")] = "http://127.0.0.1:8000",
    prompt_format: PromptFormat = "auto",
    salt: Salt = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="API key, if the server needs one.")
    ] = None,
) -> Answer:
    """Make a running vLLM load prompts from disk or Redis into memory, before users ask for them.

    Each prompt is sent to the server for one token; the server computes what is not stored. Exits with 1 if a prompt
    was refused, with 2 if the server does not answer, with 130 if interrupted.
    """
    from kvstore.tools.prefetch import prefetch as run  # noqa: PLC0415 - an extra
    from kvstore.tools.warm.prompts import check_format, count_prompts, read_prompts  # noqa: PLC0415

    format_ = check_format(prompt_format)
    found = read_prompts(prompts, format_=format_)
    with progress("tokens") as bar, interruptible(_FINISHING_PROMPT) as should_stop:
        task = bar.add_task("prefetching", total=count_prompts(prompts, format_=format_), rate="0")
        report = run(
            server,
            model,
            found,
            salt=salt,
            api_key=api_key,
            tick=lambda so_far: bar.update(task, advance=1, rate=f"{so_far.tokens / so_far.seconds:,.0f}"),
            should_stop=should_stop,
        )
    text = (
        f"{report.prompts:,} prompts of {report.tokens:,} tokens; {report.tokens_loaded:,} tokens loaded in "
        f"{report.seconds:.1f} s"
    )
    return Answer(asdict(report), [text], _exit_code(report), some(report.refused, "refused"))


def _exit_code(report: WarmReport | PrefetchReport) -> int:
    return INTERRUPTED if report.interrupted else 0 if report.is_complete else FAILED


def _require_free(config: Path | None, arguments: list[str]) -> None:
    """Refuse folders that another engine uses, before vLLM is imported.

    Raises:
        ConfigError: the configuration cannot be used.
        FolderOwnedError: names the process.
    """
    from kvstore.config import load_config  # noqa: PLC0415
    from kvstore.tools.locks import require_free  # noqa: PLC0415
    from kvstore.tools.vllmflags import parse_serve  # noqa: PLC0415

    workers = parse_serve(arguments).workers
    left_out: dict[str, object] = {"kvstore.enable_pd": False, "kvstore.peers": []}  # the run leaves them out as well
    for folder in load_config(left_out, path=config, log_warnings=False).config.local_disk_folders:
        require_free(workers.folders(Path(folder)))


def _engine_args(arguments: list[str]) -> dict[str, object]:
    """Parse the flags of vLLM after ``--``.

    Raises:
        ConfigError: vLLM is not installed, or has no such flag.
    """
    try:
        from kvstore.adapters.vllm.offline.engine import parse_engine_args  # noqa: PLC0415 - imports vLLM
    except ImportError as error:
        raise ConfigError(f"warming needs vLLM: pip install 'vllm-kvstore[vllm]' ({error})") from error
    return parse_engine_args(arguments)


@contextmanager
def _stdout_aside() -> Iterator[None]:
    """Redirect the output of vLLM and its libraries to standard error, so that standard output has only the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
