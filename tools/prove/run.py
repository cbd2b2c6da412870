"""Course of a proof: one vLLM after the other, each with one tier that can answer, and with faults.

The namespace, the folders and the private servers are the proof's own. Nothing of the user's is found or damaged.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvstore.config.schema import hide_login
from kvstore.model.errors import ConfigError
from kvstore.tools.prove.faults import can_start, damage, private_remote
from kvstore.tools.prove.judgement import Reference, judge
from kvstore.tools.prove.outputs import NoOutput, Output
from kvstore.tools.prove.prompts import Content, Prompts, made_up_prompts, read_own
from kvstore.tools.prove.session import ProvingVllm, Session, new_salts, opened
from kvstore.tools.prove.settings import Settings, read_settings, scratch_folder
from kvstore.tools.prove.situations import OWN, Measured, Result, Situation
from kvstore.tools.vllmserver import ServerFailedError

_STORED: Final = (Situation.COLD, Situation.MEMORY, Situation.DISK, Situation.DAMAGED, Situation.REMOTE)
_STARTS: Final = (
    (Situation.COLD, Situation.MEMORY),
    (Situation.DISK, Situation.DAMAGED),
    (Situation.REMOTE,),
    (Situation.KILLED,),
)
"""Situations of each vLLM with kvstore."""
FILES: Final = ("certificate.json", "certificate.html")
"""Names of the certificate's files."""
_DEV_MODE: Final = {"VLLM_SERVER_DEV_MODE": "1"}  # has a request that removes what is stored
_IN_FLIGHT_S: Final = 0.02

Report = Callable[[str], None]


@dataclass(frozen=True)
class ProveOptions:
    """Options of a proof.

    Attributes:
        arguments: those of ``vllm serve``.
        config: kvstore's configuration; None for the environment's.
        prompts: file or folder of the user's prompts; None for made-up ones.
        out: folder for logs.
        only: situations to try; empty for all.
        timeout_s: longest wait for vLLM's start, and for each answer.
    """

    arguments: Sequence[str]
    config: Path | None
    prompts: Path | None
    out: Path
    only: Sequence[Situation] = ()
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class Proof:
    """Result of a proof.

    Attributes:
        left_out: what was not tried, with reasons.
        types: the model's types by name.
    """

    settings: Settings
    prompts: Prompts
    results: Sequence[Result]
    reference: Reference
    left_out: Sequence[str]
    types: Mapping[str, str]


def prove(options: ProveOptions, report: Report) -> Proof:
    """Run every situation, and return the results.

    Args:
        options: what to run.
        report: called with the text of each stage when it begins.

    Raises:
        ConfigError: flags, configuration, prompts or ``out`` cannot be used, or plain vLLM does not answer them.
        ServerFailedError: plain vLLM does not start.
    """
    settings = read_settings(options.arguments, options.config, secrets.token_hex(8))
    course = _Course(options, settings, report, _wanted(settings, options.only))
    with ExitStack() as stack:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            for name in FILES:  # of an earlier proof, which would outlive one that fails
                (options.out / name).unlink(missing_ok=True)
            for folder in settings.config.local_disk_folders:
                course.folders.append(scratch_folder(Path(folder), options.out, settings.run_id))
                stack.callback(shutil.rmtree, course.folders[-1], ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"--out {options.out} cannot be written: {error}") from error
        course.run()
    reference = Reference.of(course.measured)
    if reference.own_hit is None and Situation.OWN_HIT in course.measured:
        del course.measured[Situation.OWN_HIT], course.measured[Situation.OWN_HIT_AGAIN]
        course.left_out.append("vLLM's own hit: its prefix cache did not have every prompt")
    results = [judge(one, course.measured[one], reference) for one in Situation if one in course.measured]
    left_out = [*settings.left_out(), *course.left_out]
    return Proof(settings, course.prompts, results, reference, left_out, course.types)


def count_stages(options: ProveOptions) -> int:
    """Return the number of stages that a proof reports, for a bar.

    Raises:
        ConfigError: flags or configuration cannot be used.
    """
    wanted = _wanted(read_settings(options.arguments, options.config, ""), options.only) - {Situation.PLAIN, *OWN}
    needed = wanted | ({Situation.COLD} if wanted & set(_STORED) else set())
    starts = sum(bool(needed & set(situations)) for situations in _STARTS)
    return 1 + len({Situation.PLAIN, *OWN}) + starts + len(needed)


def _wanted(settings: Settings, only: Sequence[Situation]) -> set[Situation]:
    """Return the situations to try.

    Raises:
        ConfigError: the configuration cannot come into one of ``only``.
    """
    possible = settings.situations
    for one in only:
        if one not in possible:
            raise ConfigError(f"--only is {one}: this configuration has {', '.join(possible)}")
    return set(only or possible)


@dataclass
class _Course:
    """State of a proof under way."""

    options: ProveOptions
    settings: Settings
    report: Report
    wanted: set[Situation]
    folders: list[Path] = field(default_factory=list)
    measured: dict[Situation, Measured] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    prompts: Prompts = field(default_factory=partial(Prompts, (), built_in=True))
    types: dict[str, str] = field(default_factory=dict)
    has_removed: bool = False

    @property
    def contents(self) -> Sequence[Content]:
        """Prompts as vLLM takes them."""
        return self.prompts.contents

    def run(self) -> None:
        """Go through all situations.

        Raises:
            ConfigError: plain vLLM does not answer the prompts.
            ServerFailedError: plain vLLM does not start.
        """
        own = self.options.prompts
        if own is not None:
            self.prompts = read_own(own, str(self.settings.flags.model))
        self._plain()
        if tiers := self.wanted & set(_STORED):
            self._tiers(tiers)
        if Situation.KILLED in self.wanted:
            self._kill_server()

    def _tiers(self, tiers: set[Situation]) -> None:
        """Store, and read from one tier after the other."""
        self._store(tiers)
        if self.measured[Situation.COLD].remark:
            return
        if tiers & {Situation.DISK, Situation.DAMAGED}:
            changes = self.settings.only(folders=self.folders)
            self._with("disk", changes, (Situation.DISK, Situation.DAMAGED), self._read_disk)
        if Situation.REMOTE in tiers:
            changes = self.settings.only(url=self.settings.config.remote_url)
            self._with("remote", changes, (Situation.REMOTE,), self._read_remote, _DEV_MODE)
            if not self.has_removed:
                url = hide_login(str(self.settings.config.remote_url))
                self.left_out.append(f"removal of what this proof stored at {url}: it stays until it is evicted")

    def _plain(self) -> None:
        self.report("starting vLLM without kvstore")
        with opened(ProvingVllm(self.settings, self._log("plain"), None, self.options.timeout_s)) as session:
            if self.options.prompts is None:
                self.prompts = made_up_prompts(session.max_model_tokens)
            self.types = session.vllm.types
            salts, backwards = new_salts(self.contents), self.contents[::-1]
            asking = {
                Situation.PLAIN: lambda: session.one_by_one(self.contents, salts),
                Situation.AGAIN: lambda: session.one_by_one(backwards, new_salts(backwards))[::-1],
                Situation.TOGETHER: lambda: session.together(backwards, new_salts(backwards))[::-1],
                Situation.OWN_HIT: lambda: session.one_by_one(self.contents, salts),
                Situation.OWN_HIT_AGAIN: lambda: session.one_by_one(self.contents, salts),
            }
            for situation in (Situation.PLAIN, *OWN):
                self.report(situation)
                self.measured[situation] = session.measure(asking[situation])
                for number, output in enumerate(self.measured[situation].outputs, 1):
                    if isinstance(output, NoOutput):
                        log = self._log("plain")
                        raise ConfigError(f"vLLM alone has no output for prompt {number}: {output.why}: see {log}")

    def _store(self, tiers: set[Situation]) -> None:
        on_disk = tiers & {Situation.DISK, Situation.DAMAGED}
        changes = self.settings.only(
            memory=self.settings.config.local_cpu,
            folders=self.folders if on_disk else (),
            url=self.settings.config.remote_url if Situation.REMOTE in tiers else None,
        )

        def work(session: Session) -> None:
            self._ask(session, Situation.COLD, stores=True)
            if Situation.MEMORY in tiers:
                self._ask(session, Situation.MEMORY)

        self._with("store", changes, (Situation.COLD, Situation.MEMORY), work)

    def _read_disk(self, session: Session) -> None:
        if Situation.DISK in self.wanted:
            self._ask(session, Situation.DISK)
        if Situation.DAMAGED in self.wanted:
            damage(self.folders)
            self._ask(session, Situation.DAMAGED)

    def _read_remote(self, session: Session) -> None:
        self._ask(session, Situation.REMOTE)
        self.has_removed = session.forget()

    def _kill_server(self) -> None:
        reason = can_start(str(self.settings.remote))
        if len(self.contents) < 2:
            reason = "it needs two prompts"
        if reason:
            self.left_out.append(f"{Situation.KILLED}: {reason}")
            return
        with ExitStack() as private:
            try:
                url = private.enter_context(private_remote(str(self.settings.remote)))
            except (ConfigError, ImportError) as error:
                self.left_out.append(f"{Situation.KILLED}: {error}")
                return
            changes = self.settings.only(url=url)
            self._with("killed-server", changes, (Situation.KILLED,), lambda session: self._ask_twice(session, private))

    def _ask_twice(self, session: Session, server: ExitStack) -> None:
        """Store, then ask for all outputs again, and kill the server in the middle."""
        name, middle = self._name(Situation.KILLED), len(self.contents) // 2
        session.measure(lambda: session.one_by_one(self.contents, new_salts(self.contents), name), stores=True)

        def asking() -> list[Output | NoOutput]:
            first, rest = self.contents[:middle], self.contents[middle + 1 :]
            outputs = list(session.one_by_one(first, new_salts(first), name))
            with ThreadPoolExecutor(1, "kvstore-prove") as asker, session.vllm.ended_if_broken():
                under_way = asker.submit(session.ask, self.contents[middle], secrets.token_hex(16), f"{name}-{middle}")
                time.sleep(_IN_FLIGHT_S)
                server.close()
                outputs.append(under_way.result())
            return [*outputs, *session.one_by_one(rest, new_salts(rest), name, begin=middle + 1)]

        self.report(Situation.KILLED)
        measured = session.measure(asking)
        later = sum(output.cached_tokens for output in measured.outputs[middle + 1 :] if isinstance(output, Output))
        if later:
            measured = replace(measured, remark=f"{later:,} tokens were found after the server was killed")
        self.measured[Situation.KILLED] = measured

    def _with(
        self,
        log: str,
        changes: Mapping[str, object],
        situations: Sequence[Situation],
        work: Callable[[Session], None],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start vLLM with kvstore for some work; situations that did not come about get the reason."""
        self.report(f"starting vLLM with kvstore: {log}")
        try:
            vllm = ProvingVllm(self.settings, self._log(log), changes, self.options.timeout_s, environment)
            with opened(vllm) as session:
                work(session)
        except ServerFailedError as error:
            for situation in (self.wanted | {Situation.COLD}).intersection(situations) - self.measured.keys():
                nothing = [NoOutput(str(error)) for _ in self.contents]
                self.measured[situation] = Measured(nothing, remark=f"{error}: see {log}.log")

    def _ask(self, session: Session, situation: Situation, *, stores: bool = False) -> None:
        self.report(situation)
        name = self._name(Situation.COLD)
        self.measured[situation] = session.measure(
            lambda: session.one_by_one(self.contents, new_salts(self.contents), name), stores=stores
        )

    def _name(self, situation: Situation) -> str:
        return f"{self.settings.run_id}-{situation}"

    def _log(self, name: str) -> Path:
        return self.options.out / f"{name}.log"
