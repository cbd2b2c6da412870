"""Command line of the steps; see ``__init__``.

It names missing packages before it imports any of them, because the machine may have no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = ("numpy", "psutil", "pydantic", "pytest", "pytest_timeout", "rich", "torch", "xxhash", "hypothesis", "yaml")
_BROUGHT = {"yaml": "pyyaml", "pytest_timeout": "pytest-timeout"}  # modules whose distribution has another name
_WRONG_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a step failed, 2 if nothing can run."""
    given = _parser().parse_args(arguments)
    missing = missing_packages()
    if missing:
        print(explain(missing), file=sys.stderr)
        return _WRONG_USAGE
    import torch  # noqa: PLC0415 - it may be missing

    from kvstore.model.errors import KVStoreError  # noqa: PLC0415

    device = torch.device(given.device or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: torch finds no GPU here (--device cpu --small tests the bench itself)", file=sys.stderr)
        return _WRONG_USAGE
    from kvstore.tools.bench.gpu import run  # noqa: PLC0415 - see above
    from kvstore.tools.bench.gpu.bed import make_scale  # noqa: PLC0415

    with TemporaryDirectory(prefix="kvstore-bench-") as scratch:
        folder = given.out or Path(scratch if given.plan == "one" else "bench-results")
        scale = make_scale(device, small=given.small, folder=folder.absolute())
        try:
            if given.plan != "one":
                return run.execute(given.plan, given.only, scale)
            run.execute_one(given.step, scale, prints=given.out is None)
        except KVStoreError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def missing_packages() -> list[str]:
    """Return the missing packages, by their names for pip."""
    return [_BROUGHT.get(name, name) for name in PACKAGES if find_spec(name) is None]


def explain(missing: list[str]) -> str:
    """Return a message that names the missing packages, and how to install them without a network."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(missing)
    return (
        f"error: {sys.executable} lacks {', '.join(missing)}. Without a network, bring them: on a machine with one,\n"
        f"  pip install --target packages --python-version {version} --only-binary :all: {names}\n"
        "and copy the folder here, except torch and numpy if they are here already. Then set PYTHONPATH to it"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvstore.tools.bench.gpu", description=__doc__)
    parser.add_argument(
        "plan", choices=("bench", "visit", "one"), help="which steps to run; one: --step, in this process"
    )
    parser.add_argument("step", nargs="?", help="the step, behind one")
    parser.add_argument("--only", metavar="GLOBS", default="*", help="steps whose name matches: limit,moves-*")
    parser.add_argument("--device", help="cuda (the default), cuda:1, cpu")
    parser.add_argument("--small", action="store_true", help="little data: for tests of the bench itself")
    parser.add_argument("--out", type=Path, help="folder for results (bench-results)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
