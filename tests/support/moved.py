"""What stands elsewhere in some versions of vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def moved(name: str, *modules: str) -> Any:
    """The object of this name, from the first of the modules that has it."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def make_arg_parser(parser: Any) -> Any:
    """The parser of ``vllm serve``."""
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # the second since 0.33
    return moved("make_arg_parser", *places)(parser)
