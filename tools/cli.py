"""Entry point of the ``kvstore`` command. Subcommands import their dependencies when they run, to keep ``--help`` fast.

Exit codes of all subcommands: 0 for success, 1 if the check or demonstration failed, 2 for wrong usage, a configuration
or target that cannot be used, or a missing package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import typer

from kvstore.tools.commands import (
    bench,
    cache_server,
    configs,
    demo,
    engines,
    flags,
    host,
    misses,
    packs,
    probing,
    proving,
    proxying,
    serving,
    simulating,
    stored,
    top,
    warming,
)
from kvstore.tools.console import Answer, for_typer

_COMMANDS: Final[dict[str, Callable[..., Answer | None]]] = {
    "kvstore inspect /mnt/nvme/kvstore --json": stored.inspect,
    "kvstore verify /mnt/nvme/kvstore --fix": stored.verify,
    "kvstore sweep s3://bucket/prefix --max-size 20480 --max-age 30": stored.sweep,
    "kvstore doctor -- MODEL --tensor-parallel-size 4 --kv-transfer-config ...": host.doctor,
    "kvstore calc --model /models/llama-8b --memory 20,200": host.calc,
    "kvstore warm --model llama/ --prompts system.jsonl --config kvstore.yaml -- --dtype bfloat16": warming.warm,
    "kvstore prefetch --server http://127.0.0.1:8000 --model llama --prompts system.jsonl": warming.prefetch,
    "kvstore proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200": proxying.proxy,
    "kvstore prove --config kvstore.yaml -- MODEL --dtype bfloat16 --tensor-parallel-size 2": proving.prove,
    "kvstore probe --url http://127.0.0.1:8000": probing.probe,
    "kvstore bench --geometry qwen-0.5b --folder /mnt/nvme": bench.bench,
    "kvstore serve --config cache.yaml": serving.serve,
    "kvstore keygen --folder keys server": serving.keygen,
    "kvstore ping --url kvs+ipc:///run/kvstore": cache_server.ping,
    "kvstore stats --url kvs+ipc:///run/kvstore": cache_server.stats,
    "kvstore top kvs+ipc:///run/kvstore": top.top,
    "kvstore lookup --url kvs+ipc:///run/kvstore --tokens prompt.json": cache_server.lookup,
    "kvstore explain --url kvs+ipc:///run/kvstore --tokens prompt.json": cache_server.explain,
    "kvstore pin --url kvs+ipc:///run/kvstore --tokens system-prompt.json": cache_server.pin,
    "kvstore pins --url kvs+ipc:///run/kvstore": cache_server.pins,
    "kvstore unpin --url kvs+ipc:///run/kvstore --tokens system-prompt.json": cache_server.unpin,
    "kvstore clear --url kvs+ipc:///run/kvstore --all": cache_server.clear,
    "kvstore version --json": host.version,
    "kvstore flags --memory 20 --disk /mnt/nvme/kvstore --disk-size 200": flags.flags,
    "kvstore demo --folder /tmp/kvstore-demo": demo.demo,
    "kvstore why cmpl-7d41 trace.jsonl": misses.why,
    "kvstore simulate trace.jsonl --size 20,40,140 --bytes-per-token 131072 --policy adaptive": simulating.simulate,
    "kvstore config check kvstore.yaml": configs.check,
    "kvstore config show --changed": configs.show,
    "kvstore config from-lmcache lmcache.yaml -o kvstore.yaml": configs.from_lmcache,
    "kvstore pack export --config kvstore.yaml -o system.kvpack --prompts system/ --model llama/": packs.export_pack,
    "kvstore pack import system.kvpack --config kvstore.yaml": packs.import_pack,
    "kvstore engine pins": engines.pins,
    "kvstore engine drain --token-file /etc/kvstore/token": engines.drain,
    "kvstore engine unpin --admin http://127.0.0.1:7000": engines.unpin,
}
"""Commands by example; the first words of an example are the command's name."""

_TAKING_VLLM_FLAGS: Final = (warming.warm, host.doctor, proving.prove)
"""Commands that take flags of ``vllm serve`` after ``--``."""

_GROUPS: Final = {
    "config": "Check, show and convert configurations.",
    "pack": "Ship chunks in one file.",
    "engine": "Administer a running engine on this machine.",
}


def _make_app() -> typer.Typer:
    app = typer.Typer(
        help="Tiered KV-cache offload for vLLM.",
        epilog="Exit codes: 0 success, 1 failure, 2 wrong usage or configuration.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in _GROUPS.items()}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for example, command in _COMMANDS.items():
        _, first, second, *_ = [*example.split(), ""]
        owner, name = (groups[first], second) if first in groups else (app, first)
        settings = {"allow_extra_args": command in _TAKING_VLLM_FLAGS}
        owner.command(name, epilog=f"Example: {example}", context_settings=settings)(for_typer(command))
    return app


app = _make_app()


def main() -> None:
    """Run the command; entry point of the distribution."""
    app()


if __name__ == "__main__":
    main()
