"""Compilation of kernels by numba and by its LLVM, which are optional, and come with vLLM.

Kernels are compiled when a codec or a cache opens, at the start of an engine, and never in a call: they accept no other
types than those they are compiled for. By numba that takes two or three seconds, and numba's cache on disk would save
them, but it is pickle. LLVM's language, for what Python cannot say, takes a twentieth of a second.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
Kernel = Callable[..., Any]

_BROKEN = (ImportError, AttributeError, LookupError, OSError, RuntimeError, SystemError, TypeError, ValueError)
"""Errors of an installation that does not work: of versions that don't go together, of libraries, of LLVM."""


@cache
def compiled(*kernels: tuple[Kernel, str]) -> tuple[Kernel, ...] | None:
    """Compile functions for their signatures; None if numba is not installed, switched off, or does not work here."""

    def make() -> tuple[Kernel, ...] | None:
        numba = import_module("numba")
        _tolerate_scans()
        if not (numbas := logging.getLogger("numba")).level:
            numbas.setLevel(logging.WARNING)  # it tells all about a compilation, in thousands of lines
        if not numba.config.DISABLE_JIT:
            return tuple(_compile(numba, function, signature) for function, signature in kernels)
        logger.info("numba is switched off: codecs use numpy, which is slower")  # it would return slow functions
        return None

    return _attempt("codecs", "numba", make)


@cache
def assembled(text: str, name: str, arguments: int) -> Kernel | None:
    """Compile a function of 64-bit integers in LLVM's language, whose calls release the GIL; None as ``compiled``."""

    def make() -> Kernel:
        llvm = import_module("llvmlite.binding")
        _tolerate_scans()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(text)
        module.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        kernel = ctypes.CFUNCTYPE(ctypes.c_int64, *arguments * (ctypes.c_int64,))(engine.get_function_address(name))
        kernel.code = engine  # type: ignore[attr-defined] # as long as the function
        return kernel

    return _attempt("copies", "llvmlite", make)


def _attempt(user: str, needed: str, make: Callable[[], Made | None]) -> Made | None:
    """Make kernels; None, and a line in the log, if what makes them is not installed or does not work here."""
    try:
        import_module(needed)
        _check_that_code_can_be_made()
        return make()
    except _BROKEN as error:
        if isinstance(error, ModuleNotFoundError) and error.name == needed:
            logger.info("%s use numpy; they are faster after pip install 'vllm-kvstore[kernels]'", user)
        else:
            found = f"{type(error).__name__}: {error}"
            logger.warning("%s does not work here, so %s use numpy, which is slower: %s", needed, user, found)
    return None


def _check_that_code_can_be_made() -> None:
    """Raise ``OSError`` where the system forbids a process to make code, which LLVM would find out by crashing."""
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


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
