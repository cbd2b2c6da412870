"""Names that some versions of vLLM define in another module."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def moved(name: str, *modules: str) -> Any:
    """Return the object of this name, from the first of the modules that has it."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def make_arg_parser(parser: Any) -> Any:
    """Return the parser of ``vllm serve``."""
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # the second since 0.33
    return moved("make_arg_parser", *places)(parser)
