"""Compilation of kernels by numba, which is optional, and comes with vLLM.

Kernels are compiled when a codec opens, at the start of an engine, and never in a call: they accept no other types than
those they are compiled for. That takes two or three seconds. Numba's cache on disk would save them, but it is pickle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]

_BROKEN = (ImportError, AttributeError, LookupError, OSError, RuntimeError, SystemError, TypeError, ValueError)
"""Errors of an installation that does not work: of versions that don't go together, of libraries, of LLVM."""


@cache
def compiled(*kernels: tuple[Kernel, str]) -> tuple[Kernel, ...] | None:
    """Compile functions for their signatures; None if numba is not installed, switched off, or does not work here."""
    try:
        numba = import_module("numba")
        _tolerate_scans()
        if not (numbas := logging.getLogger("numba")).level:
            numbas.setLevel(logging.WARNING)  # it tells all about a compilation, in thousands of lines
        if not numba.config.DISABLE_JIT:
            return tuple(_compile(numba, function, signature) for function, signature in kernels)
        logger.info("numba is switched off: codecs use numpy, which is slower")  # it would return slow functions
    except _BROKEN as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            logger.info("codecs use numpy; they are faster after pip install 'vllm-kvstore[kernels]'")
        else:
            found = f"{type(error).__name__}: {error}"
            logger.warning("numba does not work here, so codecs use numpy, which is slower: %s", found)
    return None


def _tolerate_scans() -> None:
    """Let vLLM start after numba in one process.

    Its CPU build asks each object in each module for a ``__dict__``, and llvmlite's library answers with a function.
    """
    with suppress(AttributeError):  # another llvmlite may answer as it should
        import_module("llvmlite.binding.ffi").lib._fntab.setdefault("__dict__", {})  # noqa: SLF001 - no other way


def _compile(numba: Any, function: Kernel, signature: str) -> Kernel:  # noqa: ANN401 - a module without types
    try:
        kernel: Kernel = numba.njit(signature, nogil=True, error_model="numpy")(function)
    except numba.core.errors.NumbaError as error:
        raise RuntimeError(f"{function.__name__}: {error}") from error
    return kernel
