"""Fork server for pytest, which has imported the modules that all tests import, but none of the tree.

It exists because importing torch takes longer than most tests. Start it in the tree, with the names of the modules to
import. Each line on standard input is a JSON object with ``arguments`` for pytest and the path of its ``output``; the
answers are ``{"pid": ...}`` when the run has begun, and ``{"status": ...}`` when it has ended. Every run leads a new
process group.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress


def main() -> None:
    """Answer until standard input ends."""
    sys.path[0] = ""  # as with ``python -m pytest``, instead of this file's folder
    for name in ("pytest", *sys.argv[1:]):
        with suppress(ImportError):
            importlib.import_module(name)
    if "hypothesis" in sys.modules:
        _shrink_nothing()
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(task["arguments"], task["output"])
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _shrink_nothing() -> None:
    """Let Hypothesis end with the first example that fails; profiles of tests inherit this from the default one."""
    from hypothesis import Phase, settings  # noqa: PLC0415 - imported already

    settings.register_profile("mutate", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutate")


def _run(arguments: list[str], output: str) -> None:
    """Run pytest in the fork; it never returns, and does not wait for threads that a broken test has left."""
    status = 3  # pytest's code for an internal error
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.argv = ["pytest"]
        import pytest  # noqa: PLC0415 - imported already

        status = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
