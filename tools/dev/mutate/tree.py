"""Copies of the working tree in which tests run, so that a defect never touches the tree itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvstore.tools.dev.release.checkout import files
from kvstore.tools.processes import kill_group

# Those that are slow to import.
MODULES = ("torch", "hypothesis.stateful", "hypothesis.extra.numpy", "pydantic", "yaml", "rich.table", "vllm.config")
_FORKSERVER = Path(__file__).with_name("forkserver.py")


class PytestRun(NamedTuple):
    """Run of pytest: exit status (None after a timeout), node ids that passed and failed, and output."""

    status: int | None
    passed: frozenset[str]
    failed: tuple[str, ...]
    output: str


class Tree:
    """Copy of all files that git tracks or would add, for use on one thread.

    Args:
        root: the working tree.
        home: folder of the copy, which must not exist.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self.home = home
        self._scratch = home.with_name(f"{home.name}.t")
        for name in files(root):
            target = home / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target, follow_symlinks=False)
        # By content, not by time, because a mutation may be made and undone within the resolution of file times.
        compiling = ("compileall", "-q", "--invalidation-mode", "checked-hash", ".")
        subprocess.run([sys.executable, "-m", *compiling], cwd=home, check=False, env=self._environment())  # noqa: S603
        modules: tuple[str, ...] = ()
        if (home / "kvstore").exists():
            self._check_imports()
            modules = MODULES
        self._server = subprocess.Popen(  # noqa: S603
            [sys.executable, str(_FORKSERVER), *modules],
            cwd=home,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def changed(self, name: str, before: str, after: str) -> Iterator[None]:
        """Replace ``before`` in a file by ``after``, until the end of the block."""
        path = self.home / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def test(self, tests: Sequence[str], timeout_s: float, *, at_first: bool = False) -> PytestRun:
        """Run tests, all of them or up to the first failure, and kill all processes that they started."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        arguments = ["-q", "-rpfEs", "--tb=short", "--no-header", "--hypothesis-seed=0", "-p", "no:randomly"]
        arguments += ["-p", "no:cacheprovider", f"--basetemp={self._scratch / 'b'}", *(["-x"] if at_first else [])]
        output = self._scratch / "output"
        status = self._run({"arguments": [*arguments, *tests], "output": str(output)}, timeout_s)
        return _read(status, output.read_text(encoding="utf-8", errors="replace") if output.exists() else "")

    def _run(self, task: dict[str, object], timeout_s: float) -> int | None:
        """Run a task, and return the exit status of pytest; None after a timeout."""
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        begun = server.stdout.readline()
        if not begun:  # ``close`` was called
            return None
        pid = int(json.loads(begun)["pid"])
        ran_out = threading.Event()

        def run_out() -> None:
            ran_out.set()
            kill_group(pid)

        timer = threading.Timer(timeout_s, run_out)
        timer.start()
        try:
            ended = server.stdout.readline()
        finally:
            timer.cancel()
            kill_group(pid)  # and all processes that the tests have left
        return None if ran_out.is_set() or not ended else int(json.loads(ended)["status"])

    def close(self) -> None:
        """End running tests, from any thread."""
        kill_group(self._server.pid)
        with self._server:  # closes its pipes, and waits for its end
            pass

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.home),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._scratch / "h"),  # otherwise a run would reuse another's examples
            "COLUMNS": "240",
        }

    def _check_imports(self) -> None:
        """Check that tests import this copy, and not an installed package."""
        program = "import kvstore; print(kvstore.__file__)"
        said = subprocess.run(  # noqa: S603
            [sys.executable, "-c", program], cwd=self.home, env=self._environment(), check=True, capture_output=True
        ).stdout.decode()
        if not Path(said.strip()).is_relative_to(self.home):
            raise RuntimeError(f"tests in {self.home} would import {said.strip()}")


@contextmanager
def copies(root: Path, count: int) -> Iterator[list[Tree]]:
    """Yield copies of a tree, which are deleted at the end."""
    prefix = "mutate-"  # short, because tests create unix sockets below it
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder, ExitStack() as opened:
        trees = []
        for number in range(count):
            trees.append(Tree(root, Path(folder, str(number))))
            opened.callback(trees[-1].close)
        yield trees


def _read(status: int | None, output: str) -> PytestRun:
    lines = [line.split(" ", 1) for line in output.splitlines()]
    said = [(line[0], line[1].split(" - ", 1)[0]) for line in lines if len(line) == 2]
    return PytestRun(
        status,
        frozenset(name for word, name in said if word == "PASSED"),
        tuple(name for word, name in said if word in {"FAILED", "ERROR"}),
        output,
    )
