"""Runner of a page's blocks, one by one, in a separate folder for each page."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from typer.testing import CliRunner

from kvstore.config import load_config
from kvstore.model.errors import KVStoreError
from kvstore.tools.cli import app
from kvstore.tools.dev.pages.blocks import COMMANDS, ROOT, Block, Command, commands
from kvstore.tools.dev.pages.stand_ins import (
    SERVERS,
    SHELL_WORDS,
    needs_vllm,
    program_of,
    reason_of,
    reason_of_command,
    server_of,
    substitute,
)
from kvstore.tools.models import TINY, build_llama
from kvstore.tools.processes import free_port, kill_group, wait_until

NO_VLLM: Final = "needs vLLM, which a fast run leaves out"
_COMMAND_TIMEOUT_S: Final = 600.0
_MAX_POSITION: Final = 8192
_START_TIMEOUT_S: Final = {"vllm serve": 900.0}
_REFUSAL: Final = '{"error"'  # of a server, for which curl exits with 0
_OTHER_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 90.0
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",  # servers' output is read from their logs
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; ignored on a GPU
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "PROMETHEUS_DISABLE_CREATED_SERIES": "true",
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
}
_OUR_VARIABLES: Final = ("KVSTORE_", "LMCACHE_")
_OURS: Final = re.compile(r"kvstore [^|<>$;&`]*")
_UNUSABLE: Final = 2  # as docs/commands.md says
_EXTRA: Final = "pip install 'vllm-kvstore["
_REMEDY: Final = " " * 11
_OF_THIS_MACHINE: Final = ("kvstore doctor", "kvstore version")


class Result(NamedTuple):
    """Result of a block or command.

    Attributes:
        place: page and line.
        text: text on the page.
        run_as: text that was run, if parts were replaced.
        verdict: ``ok``, ``failed`` or ``not run``.
        remark: its output, or the reason why it was not run.
    """

    place: str
    text: str
    verdict: str
    remark: str = ""
    run_as: str = ""
    seconds: float = 0.0


class PageRun:
    """Context manager of a page's run, with its folder, its servers and its Python variables; ``run`` runs a block.

    Args:
        folder: existing empty folder.
        with_vllm: also run blocks that start or query vLLM. Without it, our own commands run in this process.
    """

    def __init__(self, folder: Path, *, with_vllm: bool) -> None:
        self._folder = folder
        self._is_fast = not with_vllm
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: defaultdict[str, int] = defaultdict(free_port)
        self._names: dict[str, Any] = {"__name__": "page"}
        model = folder.parent / "model"
        self._places = {"model": str(_build_model(model) if with_vllm else model), "folder": str(folder)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OUR_VARIABLES)}
        self._environment = {**kept, **_ENVIRONMENT}
        if with_vllm:
            os.environ.update(_ENVIRONMENT)  # a page's Python and its vLLM run in this process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._servers):
            self._stop(name)

    def run(self, block: Block) -> Iterator[Result]:
        """Run a block, and yield a result for it, or for each of its commands."""
        place = f"{block.page}:{block.line}"
        if block.given:
            _lay_sandbox(self._folder)
        if why := reason_of(block):
            yield Result(place, block.body, "not run", why)
        elif block.kind in COMMANDS:
            yield from map(self._run_command, commands(block))
        elif self._is_fast and needs_vllm(block.body):
            yield Result(place, block.body, "not run", NO_VLLM)
        else:
            body = self._as_run(block.body)
            begin_s = time.monotonic()
            with contextlib.chdir(self._folder):
                said = self._python(block, body) if block.kind == "python" else self._configuration(body)
            run_as = "" if body == block.body else body
            verdict = "failed" if said else "ok"
            yield Result(place, block.body, verdict, said, run_as, time.monotonic() - begin_s)

    def _as_run(self, text: str) -> str:
        return substitute(text, self._places, self._ports.__getitem__)

    def _configuration(self, body: str) -> str:
        """Write a block to the file named in its first line, and return the configuration's problems."""
        named = re.match(r"# ([\w.-]+\.yaml)\b", body)
        file = Path(named[1] if named else "unnamed.yaml")
        file.write_text(body, encoding="utf-8")
        try:
            return "\n".join(load_config(path=file, environ={}).warnings)
        except KVStoreError as error:
            return str(error)

    def _python(self, block: Block, body: str) -> str:
        """Run a block of the page's program, and return the error, empty if there is none."""
        source = "\n" * (block.line - 1) + body
        try:
            exec(compile(source, block.page, "exec"), self._names)  # noqa: S102 - our own pages
        except Exception as error:  # noqa: BLE001 - whatever a page does
            return f"{type(error).__name__}: {error}"
        return ""

    def _run_command(self, command: Command) -> Result:
        place = f"{command.page}:{command.line}"
        why = reason_of_command(command.text)
        if not why and self._is_fast and needs_vllm(command.text):
            why = NO_VLLM
        if not why and self._lacks(program := program_of(command.words)):
            why = f"{program} is not installed here"
        if why:
            return Result(place, command.text, "not run", why)
        text = self._as_run(command.text)
        run_as = "" if text == command.text else text
        begin_s = time.monotonic()
        server = server_of(command.words)
        try:
            verdict, said = self._serve(server, text) if server else self._call(command, text)
        except subprocess.TimeoutExpired:
            verdict, said = "failed", f"it did not end within {_COMMAND_TIMEOUT_S:.0f} s"
        return Result(place, command.text, verdict, said, run_as, time.monotonic() - begin_s)

    def _lacks(self, program: str) -> bool:
        return program not in SHELL_WORDS and shutil.which(program, path=self._environment["PATH"]) is None

    def _call(self, command: Command, text: str) -> tuple[str, str]:
        """Run a command to its end, and return the verdict and the output."""
        code, said = self._execute(text)
        said = said.replace(f"{self._folder}/", "").rstrip("\n")
        if code == _UNUSABLE and _EXTRA in said:
            return "not run", said
        if not command.output:
            return "ok" if code == 0 and not said.startswith(_REFUSAL) else "failed", said
        expected = self._as_run("\n".join(command.output)).replace(f"{self._folder}/", "")
        if command.text.startswith(_OF_THIS_MACHINE):
            matches = _in_any_order(expected.splitlines(), said.splitlines())
        else:
            matches = _in_order(expected.splitlines(), said.splitlines(), any_numbers=needs_vllm(command.text))
        is_right = code in {0, 1} and matches
        return "ok" if is_right else "failed", said

    def _execute(self, text: str) -> tuple[int, str]:
        """Return the exit code and the output of a command; a fast run executes kvstore's commands in this process."""
        if self._is_fast and _OURS.fullmatch(text):
            cleared = {name: None for name in os.environ if name.startswith(_OUR_VARIABLES)}
            with contextlib.chdir(self._folder):
                result = CliRunner(env=cleared).invoke(app, shlex.split(text, comments=True)[1:])
            if result.exception is None or isinstance(result.exception, SystemExit):
                return result.exit_code, result.output
            return -1, repr(result.exception)
        done = subprocess.run(  # noqa: S603 - what our pages show
            ["bash", "-c", re.sub(r"^make ", f"make -C {ROOT} ", text)],  # noqa: S607 - the user's shell
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
        return done.returncode, done.stdout

    def _serve(self, name: str, text: str) -> tuple[str, str]:
        """Start a server in place of an earlier one at the same port, and wait until it is ready."""
        port = re.search(r"--port[ =](\d+)", text)
        key = f"{name} {port[1]}" if port else name
        self._stop(key)
        log = self._folder / f"{key.replace(' ', '-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - what our pages show
                ["bash", "-c", f"exec env {text.removesuffix('&')}"],  # noqa: S607 - the user's shell
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._servers[key] = process

        def is_settled() -> bool:
            return process.poll() is not None or SERVERS[name] in log.read_text(encoding="utf-8", errors="replace")

        is_up = (
            wait_until(is_settled, _START_TIMEOUT_S.get(name, _OTHER_START_TIMEOUT_S), every_s=0.1)
            and process.poll() is None
        )
        said = log.read_text(encoding="utf-8", errors="replace")
        return ("ok", "it serves") if is_up else ("failed", said[-3000:])

    def _stop(self, key: str) -> None:
        """End a server as Ctrl-C does, if it runs, and kill all processes that it has started."""
        process = self._servers.pop(key, None)
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        kill_group(process.pid)
        process.wait()


def _in_order(shown: list[str], said: list[str], *, any_numbers: bool) -> bool:
    """Tell if a command printed the shown lines; ``...`` matches any lines, and ``any_numbers`` ignores numbers."""
    pieces: list[list[str]] = [[]]
    for line in shown:
        if line == "...":
            pieces.append([])
        else:
            pieces[-1].append(_numbers_free(line) if any_numbers else re.escape(line))

    def is_at(piece: list[str], begin: int) -> bool:
        lines = said[begin : begin + len(piece)]
        return len(lines) == len(piece) and all(map(re.fullmatch, piece, lines))

    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return len(first) == len(said) and is_at(first, 0)
    end = len(said) - len(last)
    at = len(first)
    if at > end or not is_at(first, 0) or not is_at(last, end):
        return False
    for piece in pieces[1:-1]:
        found = next((begin for begin in range(at, end - len(piece) + 1) if is_at(piece, begin)), None)
        if found is None:
            return False
        at = found + len(piece)
    return True


def _numbers_free(line: str) -> str:
    return re.sub(r"\d(?:[\d,.]|\\[.,])*", r"[\\d,.]+", re.escape(line))


def _in_any_order(shown: list[str], said: list[str]) -> bool:
    """Tell if a report on this machine has the shown findings, in any order and with any state."""
    text = "\n".join(said)
    if not all(line == "..." or re.search(f"^{_finding(line)}$", text, re.MULTILINE) for line in shown):
        return False
    return "..." in shown or len(_findings(shown)) == len(_findings(said))


def _finding(line: str) -> str:
    """Return a pattern for a finding on any machine; a remedy must match exactly."""
    if line.startswith(_REMEDY):
        return re.escape(line)
    state, _, rest = line.partition(" ")
    topic = rest.partition(":")[0].strip()
    return rf"(?:ok|warning|error) +{re.escape(topic)}: .*" if ":" in rest else f"{re.escape(state)} .*"


def _findings(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith(_REMEDY)]


def _build_model(folder: Path) -> Path:
    """Build a small model that accepts the pages' prompts: long ones, and chats."""
    build_llama(folder, TINY, max_position=_MAX_POSITION)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}")
    return folder


def _lay_sandbox(folder: Path) -> None:
    """Create the files that a page assumes: chunks, one of them damaged, models, prompts and configurations."""
    for name in ("cache", "broken", "target"):
        shutil.rmtree(folder / name, ignore_errors=True)
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    importlib.import_module("support.sandbox").make_sandbox(folder)
