"""Commands ``kvstore doctor``, ``calc`` and ``version``: machine checks, KV sizes, installed versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.tools.commands.options import ConfigFile
from kvstore.tools.console import FAILED, WRONG_USAGE, Answer, parse_numbers, size
from kvstore.tools.workers import Workers

if TYPE_CHECKING:
    from kvstore.tools.calc import Sizes
    from kvstore.tools.doctor.findings import Finding
    from kvstore.tools.modelgroups import KVModel
    from kvstore.tools.storecosts import StoreCosts
    from kvstore.tools.vllmflags import ServeFlags

_LLAMA_8B_BYTES = 131_072

ModelPath = Annotated[Path | None, typer.Option("--model", help="Folder of the model, or its config.json.")]


def doctor(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    model: ModelPath = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the engine; each has a memory pool and a folder.")
    ] = None,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="How fast the model computes a prompt.")] = 5000.0,
) -> Answer:
    """Check whether this machine can do what the configuration asks: memory, disks, Redis, vLLM.

    Put what stands after vllm serve behind --, and the flags are checked, too, before vLLM loads a model: connector,
    role, policy, block size, workers, shutdown.

    Each disk is measured with a file of 64 MiB in its folder. Exits with 1 if there is an error, with 0 if there are
    warnings only, and with 2 if the configuration cannot be used.
    """
    from kvstore.config import load_config  # noqa: PLC0415
    from kvstore.tools.doctor.findings import Finding  # noqa: PLC0415
    from kvstore.tools.doctor.flags import check_flags, extra_config  # noqa: PLC0415
    from kvstore.tools.doctor.machine import diagnose  # noqa: PLC0415
    from kvstore.tools.doctor.together import check_sources, check_together  # noqa: PLC0415

    flags = _serve_flags(context.args, workers)
    findings = list(check_flags(flags)) if flags else []
    try:
        loaded = load_config(extra_config(flags.transfer) if flags else None, path=config, log_warnings=False)
    except ConfigError as error:
        findings.append(Finding("configuration", "error", str(error), "correct it: the rest is checked then"))
        return _diagnosis(findings, WRONG_USAGE)
    findings += check_sources(loaded)
    if flags:
        findings += check_together(flags, loaded.config)
    shared = flags.workers if flags else Workers(workers or 1)
    findings += diagnose(
        loaded.config,
        workers=shared,
        bytes_per_token=_bytes_per_token(model, flags, shared),
        prefill_tokens_per_s=prefill_tokens_per_s,
        starts=flags is not None,
    )
    return _diagnosis(findings, FAILED if any(one.state == "error" for one in findings) else 0)


def _serve_flags(arguments: list[str], workers: int | None) -> ServeFlags | None:
    """Parse the flags after ``--``; None if there are none.

    Raises:
        ConfigError: the first word is a YAML file, ``--workers`` is given too, or vLLM's ``--config`` is unreadable.
    """
    from kvstore.tools.vllmflags import parse_serve  # noqa: PLC0415

    if not arguments:
        return None
    if arguments[0].endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{arguments[0]} is not a flag of vllm serve: give a configuration as --config {arguments[0]}"
        )
    if workers is not None:
        raise ConfigError("--workers is given beside flags of vllm serve, which say it: leave it out")
    return parse_serve(arguments)


def _bytes_per_token(model: Path | None, flags: ServeFlags | None, workers: Workers) -> int:
    """Return the KV bytes of a token for each worker, of the model or, without one, of Llama-8B."""
    from kvstore.tools.calc import calculate  # noqa: PLC0415
    from kvstore.tools.modelconfig import model_of  # noqa: PLC0415

    if model is None and flags and flags.model and Path(flags.model).is_dir():
        model = Path(flags.model)
    if model is None:
        return _LLAMA_8B_BYTES // workers.per_replica
    return calculate(model_of(model), tp_size=workers.per_replica).loaded_bytes_per_token


def _diagnosis(findings: list[Finding], exit_code: int) -> Answer:
    """Make the answer, with the worst findings last, where a terminal shows them."""
    from kvstore.tools.doctor.findings import STATES  # noqa: PLC0415

    findings = sorted(findings, key=lambda finding: STATES.index(finding.state))
    tree = {"findings": [asdict(finding) for finding in findings]}
    return Answer(tree, list(map(str, findings)), exit_code)


def calc(
    *,
    model: ModelPath = None,
    geometry: Annotated[
        str | None, typer.Option(help="Instead of --model: llama-8b, llama-70b-tp8, qwen-0.5b or deepseek-mla.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Attention layers, instead of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads, with --layers.")] = None,
    head_size: Annotated[int | None, typer.Option(min=1, help="Numbers per head, with --layers.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Type of KV: auto, bfloat16, float16, float32 or fp8.")] = "auto",
    state_dtype: Annotated[
        str, typer.Option(help="Type of states (vLLM's --mamba-ssm-cache-dtype): auto, bfloat16, float16 or float32.")
    ] = "auto",
    chunk_size: Annotated[int, typer.Option(min=1, help="Tokens in a chunk.")] = 256,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a vLLM block.")] = 16,
    tp: Annotated[int, typer.Option(min=1, help="Number of tensor-parallel workers.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, of a model with windows or states.")] = 10_000,
    memory: Annotated[str, typer.Option(help="Memory sizes in GiB, such as 20,200.")] = "20,200",
    gpu: Annotated[bool, typer.Option("--gpu", help="Also the memory of a GPU, and how long pinning takes.")] = False,
    gpu_tier: Annotated[float, typer.Option(min=0, help="max_local_gpu_size, in GiB.")] = 0.0,
    s3: Annotated[bool, typer.Option("--s3", help="Also what a prompt costs in S3, and if a hit is faster.")] = False,
    load: Annotated[float, typer.Option(min=0.001, help="With --s3: GB/s that one worker loads.")] = 1.0,
    prefill: Annotated[float, typer.Option(min=0.1, help="With --s3: tokens/s that vLLM computes.")] = 5_000.0,
) -> Answer:
    """Show how many bytes of KV a token and a chunk take, and how many tokens fit in memory; all for one worker.

    Of a model with windows or states also what a checkpoint takes, and what is stored of a prompt. Exits with 2 if the
    model does not say enough.
    """
    from kvstore.tools.calc import calculate  # noqa: PLC0415

    sizes = calculate(
        _model(model, geometry, (layers, kv_heads, head_size), kv_dtype, state_dtype),
        chunk_tokens=chunk_size,
        block_tokens=block_size,
        tp_size=tp,
        memory_gib=parse_numbers(memory, "--memory", "numbers of GiB between commas, such as 20,200"),
        gpu_tier_gib=gpu_tier,
        prompt_tokens=prompt,
    )
    text = [*_kv_lines(sizes), *_checkpoint_lines(sizes, chunk_size)]
    text += [f"{gib} GiB hold {tokens:,} tokens" for gib, tokens in sizes.holds_tokens.items()]
    if gpu:
        text.append(f"of a GPU {size(sizes.device.total)} are taken: {sizes.device}")
        text += [f"{gib} GiB of memory are pinned in about {time_s:.0f} s" for gib, time_s in sizes.pin_s.items()]
    if not s3:
        return Answer(asdict(sizes), text)
    from kvstore.tools.storecosts import store_costs  # noqa: PLC0415

    costs = store_costs(sizes, load_gb_per_s=load, prefill_tokens_per_s=prefill)
    return Answer(asdict(sizes) | {"s3": asdict(costs)}, [*text, *_cost_lines(costs)])


def _cost_lines(costs: StoreCosts) -> list[str]:
    """Return the lines about an object store; money is that of S3's list prices."""
    prompt = f"a prompt of {costs.prompt_tokens:,} tokens"
    pays = f"from {costs.pays_from_tokens:,} tokens on" if costs.pays_from_tokens else "for no length"
    return [
        f"in S3 {prompt} is {costs.requests:,} objects, {size(costs.size_bytes)}, and costs",
        f"${costs.store_usd:.6f} to store, ${costs.hit_usd:.7f} a hit, ${costs.month_usd:.4f} a month",
        f"an engine's looks at the log cost ${costs.log_day_usd:.2f} a day",
        f"it is loaded in {costs.load_s:.2f} s and computed in {costs.compute_s:.2f} s: a hit is faster {pays}",
    ]


def version() -> Answer:
    """Show the versions of kvstore, vLLM and torch."""
    versions: dict[str, str | None] = {"kvstore": __version__}
    for name in ("vllm", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return Answer(versions, [f"{name} {found or 'not installed'}" for name, found in versions.items()])


def _kv_lines(sizes: Sizes) -> Iterator[str]:
    """Yield the lines for all models."""
    from kvstore.tools.calc import kept  # noqa: PLC0415

    of, workers = sizes.geometry, sizes.tp_size
    yield f"{of.layers} layers, {of.kv_heads} KV heads of {of.head_elements} numbers, {of.dtype}, {workers} worker(s)"
    yield from (f"{group.layers} layers keep only {kept(group)}" for group in sizes.groups if group.kind != "full")
    if sizes.bytes_per_token:
        yield f"a token takes {sizes.bytes_per_token:,} bytes ({size(sizes.bytes_per_token)})"
        chunk = f"a chunk of {sizes.chunk_tokens} tokens"
        yield f"{chunk} takes {size(sizes.chunk_bytes)}, its file {size(sizes.file_bytes)}"


def _checkpoint_lines(sizes: Sizes, chunk_size: int) -> Iterator[str]:
    """Yield the lines for models with windows or states."""
    checkpoint, prompt = sizes.checkpoint, sizes.prompt
    if checkpoint is None:
        return
    if sizes.chunk_tokens != chunk_size:
        blocks = f"a block of every layer ends after {sizes.alignment_tokens} tokens"
        yield f"chunk_size {chunk_size} becomes {sizes.chunk_tokens}: {blocks}"
    worth = f", as much as {checkpoint.worth_tokens:,} tokens" if checkpoint.worth_tokens is not None else ""
    yield f"a checkpoint takes {size(checkpoint.size_bytes)}, in {checkpoint.parts} part(s){worth}"
    yield (
        f"a prompt of {prompt.tokens:,} tokens stores {prompt.chunks} chunk(s) and {prompt.checkpoints} checkpoint(s): "
        f"{size(prompt.stored_bytes)}"
    )
    if prompt.promoted_bytes is not None:
        yield f"without vLLM's hybrid manager, all layers keep all tokens: {size(prompt.promoted_bytes)}"


def _model(
    model: Path | None,
    name: str | None,
    numbers: tuple[int | None, int | None, int | None],
    kv_dtype: str,
    state_dtype: str,
) -> KVModel:
    from kvstore.tools.bench.geometry import GEOMETRIES  # noqa: PLC0415
    from kvstore.tools.modelconfig import check_dtype, model_of  # noqa: PLC0415
    from kvstore.tools.modelgroups import Attention, Geometry, KVModel  # noqa: PLC0415

    if model is not None:
        return model_of(model, kv_dtype, state_dtype)
    dtype = "bfloat16" if kv_dtype == "auto" else kv_dtype
    check_dtype(dtype)
    if name is not None:
        if name not in GEOMETRIES:
            raise ConfigError(f"--geometry is {name!r}: it must be one of {', '.join(GEOMETRIES)}")
        known = GEOMETRIES[name]
        geometry = Geometry(known.layers, known.kv_heads, known.token_elements // known.kv_heads, dtype)
        return KVModel((Attention(geometry),))
    layers, kv_heads, head_size = numbers
    if layers is None or kv_heads is None or head_size is None:
        raise ConfigError("give --model, --geometry, or all of --layers, --kv-heads and --head-size")
    return KVModel((Attention(Geometry(layers, kv_heads, 2 * head_size, dtype)),))
