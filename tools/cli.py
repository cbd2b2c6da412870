"""The ``kvstore`` command. Every subcommand imports what it needs itself, so that ``--help`` answers at once.

Exit codes, for all subcommands: 0 success; 1 the check or demonstration failed; 2 wrong usage, or a configuration or
target that cannot be used, or a package that is missing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import kvstore
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools import remote_ops, serve
from kvstore.tools.commands import bench, configs, engines, host, packs, proxying, stored, warming
from kvstore.tools.console import FAILED, WRONG_USAGE, AsJson, give_up
from kvstore.tools.console import errors as _errors

if TYPE_CHECKING:
    from kvstore.tools.demo.server import DemoError

app = typer.Typer(
    help="Tiered KV-cache offload for vLLM.",
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage or configuration.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
config_app = typer.Typer(help="Work with configuration files.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(packs.pack_app, name="pack")
app.add_typer(engines.engine_app, name="engine")
app.command(epilog="Example: kvstore inspect /mnt/nvme/kvstore --json")(stored.inspect)
app.command(epilog="Example: kvstore verify /mnt/nvme/kvstore --fix")(stored.verify)
app.command(epilog="Example: kvstore doctor --config kvstore.yaml --workers 4")(host.doctor)
app.command(epilog="Example: kvstore calc --model /models/llama-8b --memory 20,200")(host.calc)
app.command(
    epilog="Example: kvstore warm --model llama/ --prompts system.jsonl --config kvstore.yaml -- --dtype bfloat16",
    context_settings={"allow_extra_args": True},
)(warming.warm)
app.command(epilog="Example: kvstore prefetch --server http://127.0.0.1:8000 --model llama --prompts system.jsonl")(
    warming.prefetch
)
app.command(epilog="Example: kvstore proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200")(
    proxying.proxy
)
app.command(epilog="Example: kvstore bench --geometry qwen-0.5b --folder /mnt/nvme")(bench.bench)
config_app.command(epilog="Example: kvstore config show --changed")(configs.show)
config_app.command("from-lmcache", epilog="Example: kvstore config from-lmcache lmcache.yaml -o kvstore.yaml")(
    configs.from_lmcache
)
serve.add_commands(app)
remote_ops.add_commands(app)


@app.command(epilog="Example: kvstore version --json")
def version(as_json: AsJson = False) -> None:
    """Print the versions of kvstore and of what it runs on."""
    from importlib import metadata  # noqa: PLC0415

    versions: dict[str, str | None] = {"kvstore": kvstore.__version__}
    for name in ("vllm", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if as_json:
        print(json.dumps(versions))
        return
    for name, found in versions.items():
        print(f"{name} {found or 'not installed'}")


@app.command(epilog="Example: kvstore demo --folder /tmp/kvstore-demo")
def demo(
    folder: Annotated[Path, typer.Option(help="Working folder: the model is kept there between runs.")] = Path(".demo"),
    as_json: AsJson = False,
) -> None:
    """Run vLLM, store a long prompt's KV, restart vLLM and load it from disk.

    Exits with 1 if the outputs differ or not every whole chunk of the prompt was loaded.
    """
    try:
        from kvstore.tools.demo.report import result_table, stage_progress  # noqa: PLC0415
        from kvstore.tools.demo.run import STAGES, run_demo  # noqa: PLC0415 - an extra
        from kvstore.tools.demo.server import DemoError  # noqa: PLC0415
    except ImportError as error:
        give_up(error)

    console = Console(stderr=as_json)
    try:
        with stage_progress(console, STAGES) as report:
            result = run_demo(folder, report=report)
    except DemoError as error:
        _explain(error)
        raise typer.Exit(FAILED) from error
    problems = result.problems()
    if as_json:
        print(json.dumps({**asdict(result), "ratio": result.ratio, "problems": problems}))
    else:
        console.print(result_table(result))
    for problem in problems:
        _errors().print(f"failed: {problem} (logs are in {folder})")
    if problems:
        raise typer.Exit(FAILED)


@app.command(epilog="Example: kvstore simulate trace.jsonl --size 20,40,140 --bytes-per-token 131072 --policy adaptive")
def simulate(
    traces: Annotated[list[Path], typer.Argument(help="Recorded by kvstore, or in Mooncake's format.", exists=True)],
    *,
    chunks: Annotated[str, typer.Option(help="Sizes of memory, in chunks: 1000,5000.")] = "",
    size: Annotated[str, typer.Option(help="Sizes of memory, in GiB; needs --bytes-per-token.")] = "",
    disk: Annotated[float | None, typer.Option(help="Size of a disk below, in the same unit.")] = None,
    bytes_per_token: Annotated[int | None, typer.Option(min=1, help="Of KV: 131072 for Llama-3.1-8B.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Repeat it for several; all if not given.")] = None,
    best: Annotated[bool, typer.Option(help="Show beside them what is best possible.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves: .svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traces through the eviction policies: what would another 100 GB bring?

    Sizes are in chunks unless --bytes-per-token is given. Exits with 2 if a trace cannot be read.
    """
    from kvstore.tools.simulate.run import SimulateOptions, simulate_and_print  # noqa: PLC0415

    try:
        options = SimulateOptions.parse(
            chunks=chunks, size=size, disk=disk, bytes_per_token=bytes_per_token, policies=policy or [], best=best
        )
        simulate_and_print(traces, options, plot_file=plot, as_json=as_json)
    except KVStoreError as error:
        _errors().print(f"error: {error}")
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigError) else FAILED) from error


@config_app.command(epilog="Example: kvstore config check kvstore.yaml")
def check(
    file: Annotated[Path, typer.Argument(help="YAML file, as KVSTORE_CONFIG_FILE names it.")],
    as_json: AsJson = False,
) -> None:
    """Check a configuration file as vLLM's start would, and show the settings that result.

    Exits with 2 if the file cannot be used.
    """
    from kvstore.config import load_config  # noqa: PLC0415

    try:
        loaded = load_config(path=file, log_warnings=False)
    except ConfigError as error:
        _errors().print(f"error: {error}")
        raise typer.Exit(WRONG_USAGE) from error
    settings = loaded.config.shown()
    origins = {name: str(origin) for name, origin in loaded.origins.items()}
    if as_json:
        print(json.dumps({"config": settings, "origins": origins, "warnings": list(loaded.warnings)}))
        return
    for warning in loaded.warnings:
        print(f"warning: {warning}")
    for name, value in settings.items():
        print(f"{name}: {json.dumps(value)}  # {origins[name].removeprefix(f'file {file}, ')}")


def _explain(error: DemoError) -> None:
    """Print an error of the demonstration, under the end of the server's log."""
    from kvstore.tools.demo.report import log_excerpt  # noqa: PLC0415

    errors = _errors()
    if error.log is not None:
        errors.print(log_excerpt(error.log))
        errors.print(f"(end of {error.log})")
    errors.print(f"error: {error}")


def main() -> None:
    """Run the command; the entry point of the distribution."""
    app()


if __name__ == "__main__":
    main()
