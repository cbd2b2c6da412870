"""The command lines of the development tools."""

from __future__ import annotations

import argparse


def parser_of(name: str, described: str | None, examples: str) -> argparse.ArgumentParser:
    """For ``python -m kvstore.tools.dev.<name>``, with a description and examples as they stand."""
    return argparse.ArgumentParser(
        prog=f"python -m kvstore.tools.dev.{name}",
        description=described,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
