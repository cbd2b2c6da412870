"""A copy of the working tree in which tests run, so that a defect never gets near the tree itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple


class TestRun(NamedTuple):
    """What pytest did: how it ended (None: it took too long), and the node ids that passed, failed and were skipped."""

    __test__ = False  # pytest looks at everything whose name begins like this

    status: int | None
    passed: frozenset[str]
    failed: tuple[str, ...]
    output: str


class Tree:
    """A copy of all files that git knows or would add, under a temporary folder of its own. One thread uses it.

    Args:
        root: the working tree.
        home: where to put the copy; the folder must not be there.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self.home = home
        self._scratch = home.with_name(f"{home.name}.t")
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        for name in _files(root):
            target = home / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target, follow_symlinks=False)
        # By content, not by time: a mutation may come and go within the resolution of a file's time.
        compiling = ("compileall", "-q", "--invalidation-mode", "checked-hash", ".")
        subprocess.run([sys.executable, "-m", *compiling], cwd=home, check=False, env=self._environment())  # noqa: S603
        where = "import kvstore; print(kvstore.__file__)" if (home / "kvstore").exists() else ""
        self._check_imports(where)

    @contextmanager
    def changed(self, name: str, before: str, after: str) -> Iterator[None]:
        """The one place where ``before`` stands in a file says ``after`` inside."""
        path = self.home / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def test(self, tests: Sequence[str], timeout_s: float, *, at_first: bool = False) -> TestRun:
        """Run tests, to their end or to the first failure. Nothing that they started outlives the call."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-rpfEs", "--tb=short", "--no-header", "--hypothesis-seed=0"]
        command += ["-p", "no:randomly", "-p", "no:cacheprovider", f"--basetemp={self._scratch / 'b'}"]
        command += ["-x"] if at_first else []
        with (self._scratch / "output").open("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(  # noqa: S603
                [*command, *tests],
                cwd=self.home,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            self._process = process
            if self._stopped:
                self.stop()
            status: int | None
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return _read(status, output.read())

    def stop(self) -> None:
        """End the tests that run, from any thread; those that are started later end at once."""
        self._stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.home),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._scratch / "h"),  # or one run would know what another has found
            "COLUMNS": "240",
        }

    def _check_imports(self, program: str) -> None:
        """See that tests import what lies here, and not an installed package."""
        said = subprocess.run(  # noqa: S603
            [sys.executable, "-c", program], cwd=self.home, env=self._environment(), check=True, capture_output=True
        ).stdout.decode()
        if said and not Path(said.strip()).is_relative_to(self.home):
            raise RuntimeError(f"tests in {self.home} would import {said.strip()}")


@contextmanager
def copies(root: Path, count: int) -> Iterator[list[Tree]]:
    """So many copies of a tree, deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:  # short: tests put unix sockets below it
        yield [Tree(root, Path(folder, str(number))) for number in range(count)]


def _files(root: Path) -> list[str]:
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=root, check=True, capture_output=True).stdout.decode().split("\0")  # noqa: S603
    return sorted({name for name in names if name and os.path.lexists(root / name)})


def _read(status: int | None, output: str) -> TestRun:
    lines = [line.split(" ", 1) for line in output.splitlines()]
    said = [(line[0], line[1].split(" - ", 1)[0]) for line in lines if len(line) == 2]
    return TestRun(
        status,
        frozenset(name for word, name in said if word == "PASSED"),
        tuple(name for word, name in said if word in {"FAILED", "ERROR"}),
        output,
    )
