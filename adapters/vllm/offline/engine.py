"""vLLM without a server, with the connector: computes the KV of prompts and lets the tiers keep it.

The scheduler side runs in this process, which therefore has the workers' facts; the workers run where vLLM puts them.
A chunk counts as stored only if the tiers themselves report it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvstore.adapters.vllm.connector import KVStoreConnector
from kvstore.adapters.vllm.flag import CONNECTOR_MODULE, connector_config
from kvstore.adapters.vllm.glue.options import remote_options
from kvstore.adapters.vllm.scheduler.shards import shards_of
from kvstore.config import load_config
from kvstore.config.sources import FILE_VARIABLES
from kvstore.engine.opening import open_directory
from kvstore.format.chunkfile import chunk_name
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.tiers import READ_ONLY, tier_behind

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

    from kvstore.model.chunks import ChunkRef
    from kvstore.model.layout import KVLayout

_POLL_S = 0.02
# Overrides of settings for serving that would leave chunks out or open a port here.
_NOT_WARMING: Mapping[str, object] = {
    "kvstore.required": True,
    "kvstore.force_skip_save": False,
    "kvstore.save_decode_cache": False,
    "kvstore.skip_last_n_tokens": 0,
    "kvstore.priority_limit": None,
    "kvstore.min_retrieve_tokens": 0,
    "kvstore.max_tokens_per_load": 0,
    "kvstore.verify_fraction": 0.0,
    "kvstore.internal_api_server_enabled": False,
    "kvstore.record_trace": None,
    "kvstore.enable_pd": False,
    "kvstore.peers": [],
    "kvstore.reshard_from": [],
}

_NO_TRAILS: Mapping[ChunkRef, bytes] = MappingProxyType({})

Work = tuple["array[int]", str | None]
"""The tokens of a prompt, and its cache salt."""


class OfflineEngine:
    """vLLM with the connector and its tiers. For use by one thread.

    Args:
        model: the model, as vLLM takes it.
        config: the YAML file, which must name a disk or a remote tier; None for the one that the environment names.
        lora: name and folder of an adapter that all prompts use.
        engine_args: further fields of vLLM's ``EngineArgs``, as the server will use them.

    Raises:
        ConfigError: the configuration keeps nothing or cannot be used, or vLLM does not start with it.
    """

    def __init__(
        self,
        model: str,
        *,
        config: Path | None = None,
        lora: tuple[str, Path] | None = None,
        engine_args: Mapping[str, object] | None = None,
    ) -> None:
        self._config = load_config(dict(_NOT_WARMING), path=config, log_warnings=False).config
        url = self._config.shared_url
        is_read_only = url is not None and tier_behind(url) in READ_ONLY
        if not self._config.local_disk_folders and (url is None or is_read_only):
            raise ConfigError("nothing to warm: set local_disk or remote_url, which outlive this process")
        self._is_remote_read_only = is_read_only
        self._lora = LoRARequest(lora[0], 1, str(lora[1])) if lora else None
        arguments: dict[str, Any] = {"async_scheduling": False, "enable_lora": lora is not None, **(engine_args or {})}
        with ExitStack() as opened:
            opened.callback(_forget_vllm)
            with _environment(config), _refusals(model):
                transfer = transfer_config(_NOT_WARMING)
                self._llm = LLM(model=model, kv_transfer_config=transfer, **arguments)
            opened.callback(self._llm.llm_engine.engine_core.shutdown)
            self._connector = connector_of(self._llm)
            self._facts = self._connector.facts
            if not self._facts:
                raise ConfigError("vLLM's workers did not say what they own: nothing could be stored")
            shards = shards_of(self._facts, remote_options(self._config))
            self._directory = open_directory(shards) if shards else None
            opened.pop_all()

    @property
    def layout(self) -> KVLayout:
        """Geometry of one worker's chunks."""
        return self._facts[0].layout

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer."""
        return self._llm.get_tokenizer()

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt, as one token is always generated."""
        return int(self._llm.llm_engine.model_config.max_model_len) - 1

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, above all token ids."""
        return int(self._llm.llm_engine.model_config.get_vocab_size())

    @property
    def saves_tails(self) -> bool:
        """True if the end of a prompt that fills no chunk is stored."""
        return self._config.saves_tails

    @property
    def max_chunks_at_once(self) -> int:
        """Limit of chunks in flight to the tiers, beyond which some would be left out."""
        num_slots = min(facts.num_slots for facts in self._facts)
        limits = [self._config.max_write_queue or num_slots // 2]
        if self._config.shared_url is not None and not self._is_remote_read_only:
            limits.append(self._config.max_remote_queue or num_slots // 4)
        return max(1, min(limits))

    def chunk_bytes(self, ref: ChunkRef) -> int:
        """Return the bytes of KV in a chunk, of all workers together."""
        return sum(facts.layout.payload_bytes(ref.num_blocks) for facts in self._facts)

    def stored(self, refs: Sequence[ChunkRef], trails: Mapping[ChunkRef, bytes] = _NO_TRAILS) -> list[bool]:
        """Tell for each chunk if every worker has stored it in every tier that outlives this process.

        On disk, a longer chunk may hold the last chunk of a prompt, found by the trail given for it. A chunk in a
        read-only remote tier need not be on disk.
        """
        if not refs:
            return []
        answers = self._directory.answer(refs) if self._directory else [False] * len(refs)
        remote = [bool(is_there) for is_there in answers]
        if self._is_remote_read_only:
            return [has or self._on_disk(ref, trails) for ref, has in zip(refs, remote, strict=True)]
        if self._directory is not None and not self._config.local_disk_folders:
            return remote
        pairs = zip(refs, remote, strict=True)
        return [self._on_disk(ref, trails) and (has or not self._directory) for ref, has in pairs]

    def compute(self, work: Sequence[Work]) -> int:
        """Compute the KV of prompts where it is not stored, send it to the tiers, and return the tokens computed."""
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prompts: list[dict[str, Any]] = []
        for tokens, salt in work:
            prompts.append({"prompt_token_ids": tokens.tolist(), **({"cache_salt": salt} if salt else {})})
        outputs = self._llm.generate(prompts, params, lora_request=self._lora, use_tqdm=False)
        return sum(len(tokens) for tokens, _ in work) - sum(output.num_cached_tokens or 0 for output in outputs)

    def wait(self, refs: Sequence[ChunkRef], trails: Mapping[ChunkRef, bytes] = _NO_TRAILS) -> list[ChunkRef]:
        """Wait until chunks are stored, as long as some still arrive, and return those that are not stored."""
        missing = list(refs)
        last_arrival_s = time.monotonic()
        while missing and time.monotonic() - last_arrival_s < self._config.blocking_timeout_secs:
            left = [ref for ref, is_there in zip(missing, self.stored(missing, trails), strict=True) if not is_there]
            if len(left) < len(missing):
                last_arrival_s = time.monotonic()
            missing = left
            if missing:
                time.sleep(_POLL_S)
        return missing

    def close(self) -> None:
        """End vLLM, which first waits for its transfers."""
        if self._directory is not None:
            self._directory.close()
        end_vllm(self._llm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _on_disk(self, ref: ChunkRef, trails: Mapping[ChunkRef, bytes]) -> bool:
        """Tell if every worker has a chunk on disk, or a longer one that holds it."""
        if self._has_files(ref):
            return True
        index = self._connector.index
        return index is not None and any(map(self._has_files, index.longer(trails.get(ref, b""))))

    def _has_files(self, ref: ChunkRef) -> bool:
        """Tell if every worker has a file of this chunk in one of its folders; only complete files have that name."""
        workers = len(self._facts)
        for rank, facts in enumerate(self._facts):
            below = f"rank-{rank}-of-{workers}" if workers > 1 else ""
            name = Path(below, facts.namespace.id.hex(), chunk_name(ref))
            if not any((folder / name).is_file() for folder in map(Path, self._config.local_disk_folders)):
                return False
        return True


def connector_of(llm: LLM) -> KVStoreConnector:
    """Return the connector of a vLLM whose engine core is in this process; vLLM has no public API for it."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    assert isinstance(connector, KVStoreConnector)
    return connector


def end_vllm(llm: LLM) -> None:
    """End a vLLM in this process, and free its state."""
    llm.llm_engine.engine_core.shutdown()
    _forget_vllm()


def _forget_vllm() -> None:
    """Free vLLM's state in this process; a failed start leaves some, too."""
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def parse_engine_args(arguments: Sequence[str]) -> dict[str, object]:
    """Parse flags of ``vllm serve`` into fields of ``EngineArgs``, but return only those that were given.

    Raises:
        ConfigError: vLLM does not have a flag, or it may not be given here.
    """
    parser = FlexibleArgumentParser(exit_on_error=False, add_help=False)
    EngineArgs.add_cli_args(parser)
    try:
        given, default = parser.parse_args(list(arguments)), parser.parse_args([])
    except (SystemExit, argparse.ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(f"vLLM does not take {' '.join(arguments)}: give flags of vllm serve after --") from error
    names = [field.name for field in dataclasses.fields(EngineArgs) if hasattr(given, field.name)]
    changed = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(default, name)}
    for name in ("model", "kv_transfer_config"):
        if name in changed:
            raise ConfigError(f"--{name.replace('_', '-')} is not given after --: see kvstore warm --help")
    return changed


@contextmanager
def _refusals(model: str) -> Iterator[None]:
    """Convert vLLM's errors at start, about the model's files or a flag, into a ``ConfigError``.

    Raises:
        ConfigError: quotes vLLM's error.
    """
    try:
        yield
    except KVStoreError:
        raise
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM does not start with {model} and these flags: {error}") from error


def transfer_config(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return vLLM's KV transfer configuration for the connector with these settings."""
    return {
        **connector_config(),
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_connector_extra_config": dict(settings),
    }


@contextmanager
def _environment(config: Path | None) -> Iterator[None]:
    """Set the variables that vLLM and the connector read while the engine starts, and restore them afterwards.

    The environment names the configuration file, because vLLM prints its arguments, passwords included.
    """
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if config is not None:
        wanted[FILE_VARIABLES[0]] = str(config.absolute())
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
