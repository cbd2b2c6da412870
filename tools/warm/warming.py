"""Offline warming, which computes and stores the KV of known prompts before the first request.

    from kvstore.tools.warm import warm

    report = warm("meta-llama/Llama-3.1-8B-Instruct", ["You are ..."], config="kvstore.yaml")

Stored chunks are not computed again. A batch counts as done only when the tiers hold it, so a run that was interrupted
in any way can simply be started again.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.model.chunks import ChunkRef
from kvstore.tools import console
from kvstore.tools.warm.prompts import Prompt, PromptError, Rejected, parse, read_prompts
from kvstore.tools.warm.wanted import Lora, Sharing, Wanted, wanted

if TYPE_CHECKING:
    from kvstore.adapters.vllm.offline.engine import OfflineEngine

MAX_BATCH_PROMPTS = 32  # vLLM computes them together; after each batch the run waits for the tiers
_ROUNDS = 3  # attempts to store chunks that were refused because a queue was full


@dataclass
class WarmReport:
    """Result of a run.

    Attributes:
        prompts: prompts whose chunks are all stored now.
        prompts_present: prompts among these whose chunks were all stored before.
        failed_prompts: prompts with a chunk that could not be stored.
        skipped: malformed or too long prompts, each with its place and the reason.
        tokens: tokens of all prompts except the skipped ones.
        tokens_computed: tokens among these that vLLM computed, neither loaded nor shared with another prompt.
        chunks_stored, chunks_present, chunks_failed: numbers of distinct chunks.
        bytes_stored: bytes of KV without headers, before any codec.
        seconds: duration of the run, without the start of vLLM.
        interrupted: whether the run was stopped before the last prompt; start it again to complete it.
    """

    prompts: int = 0
    prompts_present: int = 0
    failed_prompts: int = 0
    skipped: list[Rejected] = field(default_factory=list)
    tokens: int = 0
    tokens_computed: int = 0
    chunks_stored: int = 0
    chunks_present: int = 0
    chunks_failed: int = 0
    bytes_stored: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        """True if all chunks of all prompts are stored."""
        return not (self.skipped or self.chunks_failed or self.interrupted)


Tick = Callable[[WarmReport], None]
"""Callback after each batch, with the report so far."""


def warm(
    model: str,
    prompts: Iterable[object],
    *,
    config: str | Path | None = None,
    lora: tuple[str, str | Path] | None = None,
    salt: str | None = None,
    engine_args: Mapping[str, object] | None = None,
    progress: bool = False,
    total: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> WarmReport:
    """Run vLLM offline over prompts, so that the configured disk and remote tiers hold their KV.

    Args:
        model: model name or folder, as passed to vLLM.
        prompts: any iterable of texts, lists of token ids, lists of chat messages, objects as in a ``.jsonl`` file,
            paths of files or folders, or results of ``read_prompts``.
        config: the YAML file that the server will use; None for the one that ``KVSTORE_CONFIG_FILE`` names.
        lora: an adapter's name in requests, and its folder.
        salt: ``cache_salt`` of prompts without one.
        engine_args: fields of vLLM's ``EngineArgs`` that the server will have, because ``dtype``, ``block_size``,
            ``tensor_parallel_size`` and others determine whether its KV is the same.
        progress: show a bar on standard error.
        total: number of prompts, to show the time left; None for the length of ``prompts``, if it has one.
        should_stop: called before each batch.

    Raises:
        ConfigError: the configuration stores nothing or cannot be used, or vLLM does not start with it. Later errors of
            vLLM pass through.
        TierError: a required tier cannot be used, or a folder belongs to another engine.
    """
    from kvstore.adapters.vllm.offline.engine import OfflineEngine  # noqa: PLC0415 - imports vLLM

    adapter = Lora(lora[0], Path(lora[1])) if lora else None
    sharing = Sharing.of(adapter, salt)
    with OfflineEngine(
        model, config=Path(config) if config is not None else None, lora=adapter, engine_args=engine_args
    ) as engine:
        if not progress:
            return warm_with(engine, prompts, sharing, should_stop=should_stop)
        with _shown(total if total is not None else operator.length_hint(prompts) or None) as tick:
            return warm_with(engine, prompts, sharing, tick=tick, should_stop=should_stop)


def warm_with(
    engine: OfflineEngine,
    prompts: Iterable[object],
    sharing: Sharing,
    *,
    tick: Tick = lambda _report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> WarmReport:
    """Do the same as ``warm`` with a running engine."""
    run = _Run(engine, tick)
    found = wanted(
        as_prompts(prompts),
        engine.layout,
        sharing,
        engine.tokenizer,
        max_tokens=engine.max_tokens,
        vocab_size=engine.vocab_size,
        with_tail=engine.saves_tails,
    )
    for batch in _batches(found, engine.max_chunks_at_once, run.report.skipped):
        if should_stop():
            run.report.interrupted = True
            break
        run.warm(batch)
    run.note()
    return run.report


class _Run:
    """One run over all batches."""

    def __init__(self, engine: OfflineEngine, tick: Tick) -> None:
        self.report = WarmReport()
        self._engine = engine
        self._tick = tick
        self._begin_s = time.monotonic()
        self._counted: set[ChunkRef] = set()
        self._failed: set[ChunkRef] = set()

    def warm(self, batch: Sequence[Wanted]) -> None:
        """Compute the missing chunks of a batch, and wait until the tiers hold them."""
        report = self.report
        refs = list(dict.fromkeys(ref for item in batch for ref in item.refs))
        trails = {item.refs[-1]: item.trail for item in batch if item.refs}
        is_there = dict(zip(refs, self._engine.stored(refs, trails), strict=True))
        missing = self._compute(batch, [ref for ref in refs if not is_there[ref]], trails)
        for ref in refs:
            if ref in self._counted:
                continue
            self._counted.add(ref)
            if is_there[ref]:
                report.chunks_present += 1
            elif ref not in missing:
                report.chunks_stored += 1
                report.bytes_stored += self._engine.chunk_bytes(ref)
        self._failed |= missing
        for item in batch:
            report.tokens += len(item.tokens)
            report.prompts_present += all(is_there[ref] for ref in item.refs)
            if missing.isdisjoint(item.refs):
                report.prompts += 1
            else:
                report.failed_prompts += 1
        self.note()

    def _compute(
        self, batch: Sequence[Wanted], wanted_refs: list[ChunkRef], trails: Mapping[ChunkRef, bytes]
    ) -> set[ChunkRef]:
        """Have vLLM compute the prompts with missing chunks, and return the chunks that are still missing."""
        missing = set(wanted_refs)
        for _ in range(_ROUNDS):
            work = [item for item in batch if not missing.isdisjoint(item.refs)]
            if not work:
                break
            self.report.tokens_computed += self._engine.compute([(item.tokens, item.salt) for item in work])
            before = len(missing)
            missing = set(self._engine.wait(sorted(missing), trails))
            if len(missing) == before:
                break
        return missing

    def note(self) -> None:
        """Update the report, and pass it to the tick."""
        self.report.chunks_failed = len(self._failed)
        self.report.seconds = time.monotonic() - self._begin_s
        self._tick(self.report)


@contextmanager
def _shown(total: int | None) -> Iterator[Tick]:
    """Show a bar that counts prompts, with tokens per second and the time left, and yield its tick."""
    with console.progress("tokens") as bar:
        task = bar.add_task("warming", total=total, rate="0")

        def tick(report: WarmReport) -> None:
            done = report.prompts + report.failed_prompts + len(report.skipped)
            rate = report.tokens / report.seconds if report.seconds else 0.0
            bar.update(task, completed=done, rate=f"{rate:,.0f}")

        yield tick


def as_prompts(values: Iterable[object]) -> Iterator[Prompt | Rejected]:
    """Yield a caller's values as prompts, numbered from 1.

    Raises:
        ConfigError: there is no such file.
    """
    for number, value in enumerate(values, start=1):
        if isinstance(value, Prompt | Rejected):
            yield value
            continue
        if isinstance(value, Path):
            yield from read_prompts(value)
            continue
        where = f"prompt {number}"
        try:
            yield parse(value, where)
        except PromptError as error:
            yield Rejected(where, str(error))


def _batches(found: Iterable[Wanted | Rejected], max_chunks: int, skipped: list[Rejected]) -> Iterator[list[Wanted]]:
    """Yield batches of at most ``max_chunks``, but at least one prompt, and add rejected prompts to ``skipped``."""
    batch: list[Wanted] = []
    chunks = 0
    for item in found:
        if isinstance(item, Rejected):
            skipped.append(item)
            continue
        if batch and (len(batch) == MAX_BATCH_PROMPTS or chunks + len(item.refs) > max_chunks):
            yield batch
            batch, chunks = [], 0
        batch.append(item)
        chunks += len(item.refs)
    if batch:
        yield batch
