"""Command lines of the development tools."""

from __future__ import annotations

import argparse


def parser_of(name: str, described: str | None, examples: str) -> argparse.ArgumentParser:
    """Return the parser of ``python -m kvstore.tools.dev.<name>``, with description and examples unwrapped."""
    return argparse.ArgumentParser(
        prog=f"python -m kvstore.tools.dev.{name}",
        description=described,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
