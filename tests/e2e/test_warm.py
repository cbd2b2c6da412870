"""Tests of offline warming and shipped packs: every first request hits, and nothing is computed twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.lora import build_lora
from support.redis_server import RedisServer, running
from support.vllm_engine import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    forget_failed_start,
    whole_blocks,
)
from support.warm_engine import refs_of

from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import KeyExtras
from kvstore.tiers.disk.inventory import inventories
from kvstore.tools.demo.server import VllmServer
from kvstore.tools.models import TINY, as_text, random_tokens
from kvstore.tools.verify import verify
from kvstore.tools.vllmclient import TOKENS_LOADED, complete, read_counter
from kvstore.tools.warm.prompts import load_tokenizer
from kvstore.tools.warm.wanted import Lora, Sharing
from kvstore.tools.warm.warming import warm

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

FLAGS = ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "4096", "--enforce-eager"]
PREFETCHED = 4
ENGINE_ARGS = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2048, "enforce_eager": True}


def config_file(folder: Path, cache: Path) -> Path:
    file = folder / f"{cache.name}.yaml"
    file.write_text(f"max_local_cpu_size: 0.25\nlocal_disk: {cache}\nmax_local_disk_size: 1\n", encoding="utf-8")
    return file


def stored_names(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*.safetensors")}


def names(refs: Sequence[ChunkRef]) -> set[str]:
    return {f"{ref.prefix_key.hex()}-{ref.num_blocks}.safetensors" for ref in refs}


def warm_command(model: Path, prompts: Path, config: Path) -> list[str]:
    options = ["--model", str(model), "--prompts", str(prompts), "--config", str(config), "--json"]
    return [sys.executable, "-m", "kvstore.tools.cli", "warm", *options, "--", *FLAGS]


def kvstore(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstore.tools.cli", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


def kill_at_half(command: list[str], cache: Path, half: int) -> None:
    """Start warming, and kill all of its processes without notice once so many chunks are stored."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        while process.poll() is None and len(stored_names(cache)) < half:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.soak
def test_fifty_prompts_from_one_machine_to_another(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    prompts = [random_tokens(rng.randrange(40, 1200), vocab=TINY.vocab, seed=100 + n) for n in range(50)]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(as_text(p) if n % 2 else {"prompt_token_ids": p}) for n, p in enumerate(prompts)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    cache, target = tmp_path / "cache", tmp_path / "target"
    command = warm_command(tiny_model, file, config_file(tmp_path, cache))

    # Killed halfway and started again, it does not recompute stored chunks.
    kill_at_half(command, cache, half=100)
    before = stored_names(cache)
    assert len(before) >= 100
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    (inventory,) = inventories(cache)
    layout = inventory.layout
    assert layout is not None
    refs = [refs_of(layout, prompt, KeyExtras()) for prompt in prompts]
    assert len(before) < sum(map(len, refs)), "it was killed too late"
    assert report["chunks_present"] == len(before)
    assert report["chunks_stored"] == sum(map(len, refs)) - len(before)
    assert report["chunks_failed"] == 0
    assert report["prompts"] == 50
    assert report["tokens_computed"] == sum(
        len(prompt) - prefix_tokens(chunks, before)
        for prompt, chunks in zip(prompts, refs, strict=True)
        if not names(chunks) <= before
    )
    # Without vLLM, the same keys.
    assert stored_names(cache) == set().union(*map(names, refs)) == keys_without_vllm(file, tiny_model, cache)

    # Shipped.
    pack = tmp_path / "system.kvpack"
    assert (
        kvstore("pack", "export", "--folder", cache, "--prompts", file, "--model", tiny_model, "-o", pack)["missing"]
        == 0
    )
    assert kvstore("pack", "import", pack, "--folder", target)["chunks"] == sum(map(len, refs))

    with Engine(tiny_model, max_model_len=4096) as engine:
        plain = engine.generate(prompts, logprobs=2)
        tokenizer = engine.llm.get_tokenizer()

    # Read in place, and refused where it does not fit.
    in_place = StoreSetup(extra={"kvstore.remote_url": f"pack://{pack}"})
    with Engine(tiny_model, in_place, max_model_len=4096) as engine:
        from_pack = engine.generate(prompts)
        assert engine.store_scheduler.index.counters.sends_dropped == 0
    assert [output.cached_tokens for output in from_pack] == [whole_blocks(len(prompt)) for prompt in prompts]
    assert_same_outputs(plain, from_pack)
    with pytest.raises(Exception, match=r"differs in.* layout"):
        Engine(tiny_model, in_place, block_size=64)
    forget_failed_start()

    # Served.
    with VllmServer(tiny_model, config_file(tmp_path, target), tmp_path / "serve.log", drains=False) as server:
        few = tmp_path / "few.jsonl"
        few.write_text("\n".join(lines[:PREFETCHED]), encoding="utf-8")
        report = kvstore("prefetch", "--server", server.url, "--model", tiny_model, "--prompts", few)
        assert report["tokens_loaded"] == sum(whole_blocks(len(prompt)) for prompt in prompts[:PREFETCHED])
        for number, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
            loaded = read_counter(server.url, TOKENS_LOADED)
            answer = complete(server.url, str(tiny_model), as_text(prompt), output_tokens=12)
            if number >= PREFETCHED:  # vLLM itself has the others by now
                assert read_counter(server.url, TOKENS_LOADED) - loaded == whole_blocks(len(prompt))
            ids = expected.token_ids if expected.tie_at is None else expected.token_ids[: expected.tie_at]
            assert answer.text.split()[: len(ids)] == tokenizer.decode(ids).split()


def prefix_tokens(refs: Sequence[ChunkRef], stored: set[str]) -> int:
    """Return the tokens of the whole chunks that a prompt finds, from its head up to the first missing one."""
    tokens = 0
    for ref in refs:
        if not names([ref]) <= stored:
            break
        tokens += ref.num_blocks * BLOCK_TOKENS
    return tokens


def keys_without_vllm(prompts: Path, model: Path, cache: Path) -> set[str]:
    """Return the file names that a process which cannot import vLLM derives from the prompts."""
    script = """
import sys
from pathlib import Path
sys.modules["vllm"] = None
from kvstore.tiers.disk.inventory import inventories
from kvstore.tools.warm.prompts import load_tokenizer, read_prompts
from kvstore.tools.warm.wanted import Sharing, wanted
(inventory,) = inventories(Path(sys.argv[3]))
for item in wanted(read_prompts(Path(sys.argv[1])), inventory.layout, Sharing(), load_tokenizer(sys.argv[2])):
    for ref in item.refs:
        print(f"{ref.prefix_key.hex()}-{ref.num_blocks}.safetensors")
"""
    command = [sys.executable, "-c", script, str(prompts), str(model), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.sweep
def test_api_with_adapter_and_salt(tiny_model: Path, tmp_path: Path) -> None:
    """Texts and tokens are warmed with an adapter and a salt, faulty prompts are skipped, and other salts miss."""
    adapter = build_lora(tmp_path / "lora", TINY, model_folder=tiny_model, seed=3)
    prompts: list[Prompt] = [random_tokens(n, vocab=TINY.vocab, seed=n) for n in (300, 600)]
    cache = tmp_path / "cache"
    report = warm(
        str(tiny_model),
        [as_text(prompts[0]), prompts[1], "", [1, TINY.vocab], prompts[1] * 4],
        config=config_file(tmp_path, cache),
        lora=("one", adapter),
        salt="mine",
        engine_args=ENGINE_ARGS,
    )
    assert (report.prompts, report.chunks_stored, report.chunks_failed) == (2, 2 + 3, 0)
    assert [item.where for item in report.skipped] == ["prompt 3", "prompt 4", "prompt 5"]
    assert "vocabulary" in report.skipped[1].why
    assert "too long" in report.skipped[2].why
    assert not report.is_complete

    sharing = Sharing.of(Lora("one", adapter), "mine")
    (inventory,) = inventories(cache)
    assert inventory.layout is not None
    extras = KeyExtras(lora=sharing.lora, cache_salt="mine")
    expected = set().union(*(names(refs_of(inventory.layout, prompt, extras)) for prompt in prompts))
    assert stored_names(cache) == expected
    assert load_tokenizer(str(tiny_model)).encode(as_text(prompts[0]), add_special_tokens=True) == prompts[0]

    from vllm.lora.request import LoRARequest

    with Engine(tiny_model, StoreSetup(cache), enable_lora=True) as engine:
        request = LoRARequest("one", 7, str(adapter))
        hits = engine.generate(prompts, salts=["mine"] * 2, lora=request)
        assert [hit.cached_tokens for hit in hits] == [whole_blocks(len(prompt)) for prompt in prompts]
        assert [hit.cached_tokens for hit in engine.generate(prompts, salts=["other"] * 2, lora=request)] == [0, 0]


@pytest.mark.sweep
def test_a_tail_that_a_longer_prompt_replaces_is_there_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    """The shorter of two prompts hits its tail, although the longer one has filled that chunk since."""
    longer = random_tokens(700, vocab=TINY.vocab, seed=1)
    shorter = longer[:300]
    cache = tmp_path / "cache"
    report = warm(str(tiny_model), [shorter, longer], config=config_file(tmp_path, cache), engine_args=ENGINE_ARGS)
    assert report.is_complete
    with Engine(tiny_model, StoreSetup(cache)) as engine:
        hits = engine.generate([longer]) + engine.generate([shorter])
    assert hits[0].cached_tokens == whole_blocks(700)
    assert hits[1].cached_tokens == whole_blocks(300)
    assert whole_blocks(300) > CHUNK_TOKENS


@pytest.mark.sweep
def test_into_redis(tiny_model: Path, tmp_path: Path) -> None:
    """Without a disk, chunks in Redis are not recomputed, and another engine finds them there."""
    prompts: list[object] = [random_tokens(n, vocab=TINY.vocab, seed=n) for n in (300, 600)]
    server = RedisServer(tmp_path / "redis")
    with running(server):
        url = f"redis://127.0.0.1:{server.port}"
        file = tmp_path / "kvstore.yaml"
        file.write_text(f"max_local_cpu_size: 0.25\nremote_url: {url}\n", encoding="utf-8")
        first = warm(str(tiny_model), prompts[:1], config=file, engine_args=ENGINE_ARGS)
        assert (first.chunks_stored, first.is_complete) == (2, True)
        again = warm(str(tiny_model), prompts, config=file, engine_args=ENGINE_ARGS)
        assert (again.prompts_present, again.chunks_present, again.chunks_stored) == (1, 2, 3)
        assert again.tokens_computed == 600
        assert (verify(url).chunks, verify(url).faults) == (5, [])


def test_nothing_to_warm(tiny_model: Path, tmp_path: Path) -> None:
    from kvstore.model.errors import ConfigError

    file = tmp_path / "kvstore.yaml"
    file.write_text("max_local_cpu_size: 0.25\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="nothing to warm"):
        warm(str(tiny_model), ["x"], config=file, engine_args=ENGINE_ARGS)
