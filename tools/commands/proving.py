"""Command ``kvstore prove``, which proves that vLLM answers the same with kvstore as without it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from kvstore.model.errors import ConfigError
from kvstore.tools.commands.options import ConfigFile
from kvstore.tools.console import FAILED, UNPROVEN, WRONG_USAGE, Answer, errors, give_up, stage_progress
from kvstore.tools.interrupts import interruptible
from kvstore.tools.processes import handled

if TYPE_CHECKING:
    from kvstore.tools.prove.run import ProveOptions
    from kvstore.tools.prove.situations import Situation

_CODES: Final = {"proven": 0, "not proven": UNPROVEN, "failed": FAILED, "differs": FAILED}


def prove(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl or text file, or a folder of such files; by default made-up prompts.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the certificate, its page and vLLM's logs.")] = Path("proof"),
    only: Annotated[
        list[str] | None, typer.Option(help="One situation, such as disk, beside plain vLLM; may be repeated.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key (Ed25519, PEM) that signs the certificate.")] = None,
    checked: Annotated[Path | None, typer.Option("--check", help="Check a certificate, and run nothing.")] = None,
    public_key: Annotated[Path | None, typer.Option(help="With --check: the key that must have signed it.")] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, help="How long vLLM may take to start, and for each answer.")
    ] = 1800.0,
) -> Answer:
    """Prove, with your model, flags and configuration, that vLLM answers the same with kvstore as without it.

    Put what stands after vllm serve behind --. vLLM is started several times: without kvstore, cold, with hits from
    each tier that is configured, with damaged files and with a killed server. Whether bytes really moved is counted,
    and outputs and logprobs are compared, as much as vLLM differs from itself. Folders, servers and names are the
    proof's own: nothing of yours is read or damaged.

    Exits with 0 if all is proven; with 1 if an output differs or is missing, or a checked certificate was changed; with
    2 if vLLM cannot be started; with 3 if something could not be shown.
    """
    if checked is not None:
        return _check(checked, public_key)
    if public_key is not None:
        raise ConfigError("--public-key is for --check: give --key to sign")
    from kvstore.tools.prove.run import ProveOptions  # noqa: PLC0415 - an extra

    situations = [_situation(name) for name in only or ()]
    return _prove(ProveOptions(context.args, config, prompts, out, situations, timeout_s), key)


def _prove(options: ProveOptions, key: Path | None) -> Answer:
    from kvstore.tools.prove.certificate import body_of, check, seal  # noqa: PLC0415
    from kvstore.tools.prove.page import page_of  # noqa: PLC0415
    from kvstore.tools.prove.run import FILES, count_stages, prove  # noqa: PLC0415 - an extra
    from kvstore.tools.vllmserver import ServerFailedError, log_excerpt  # noqa: PLC0415

    sign = None
    if key is not None:
        from kvstore.tools.prove.signing import signer  # noqa: PLC0415 - an extra

        sign = signer(key)
    console = Console(stderr=True)
    try:
        # A closed terminal must not leave a vLLM behind, which has a session of its own.
        with (
            interruptible("ending vLLM", at_once=True),
            handled((signal.SIGHUP,), lambda *_: sys.exit(128 + signal.SIGHUP)),
            stage_progress(console, count_stages(options)) as report,
        ):
            proof = prove(options, report)
    except ServerFailedError as error:
        if error.log is not None:
            errors().print(log_excerpt(error.log))
        give_up(error, WRONG_USAGE)
    sealed = seal(body_of(proof), sign)
    signed = check(sealed, None)
    for name, text in zip(FILES, (json.dumps(sealed, indent=1) + "\n", page_of(sealed, signed)), strict=True):
        (options.out / name).write_text(text, encoding="utf-8")
    answer = _answer(sealed, signed)
    return answer._replace(text=[*answer.text, f"written: {options.out}/{' and '.join(FILES)}"])


def _check(file: Path, public_key: Path | None) -> Answer:
    from kvstore.tools.prove.certificate import check, read_certificate  # noqa: PLC0415
    from kvstore.tools.prove.forged import ForgedError  # noqa: PLC0415

    sealed = read_certificate(file)
    try:
        return _answer(sealed, check(sealed, public_key))
    except ForgedError as error:
        return Answer({"forged": str(error)}, [], FAILED, error=f"{file} is forged or damaged: {error}")


def _answer(sealed: Mapping[str, Any], signed: str) -> Answer:
    body = sealed["certificate"]
    lines = [f"{one['situation']:<15}{one['verdict']:<12}{one['words']}" for one in body["situations"]]
    lines += [f"left out: {line}" for line in body["left_out"]]
    lines += [f"verdict: {body['verdict']}", signed]
    return Answer(sealed, lines, _CODES[body["verdict"]])


def _situation(name: str) -> Situation:
    """Return a situation by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    from kvstore.tools.prove.situations import Situation  # noqa: PLC0415

    if name not in list(Situation):
        raise ConfigError(f"--only is {name!r}: it must be one of {', '.join(Situation)}")
    return Situation(name)
