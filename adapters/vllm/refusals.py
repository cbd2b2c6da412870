"""Prints an error at start once, as the last lines that a person sees.

vLLM's scheduler and workers are separate processes. An error in one of them is printed with its traceback by each
process that it passes, in hundreds of lines, and vLLM's last line only says that the cause is above. So the first
process, where ``vllm serve`` was called, keeps a file in memory to which the others write such an error, and prints it
when it ends. Every process of vLLM imports this module, so it imports little.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from kvstore.model.errors import KVStoreError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VARIABLE: Final = "_KVSTORE_REFUSALS"
MARK: Final = "kvstore: error: "
_FILE: Final = "kvstore-refusals"
_MAX_BYTES: Final = 1 << 16
_END: Final = "\0"
_TRACKER_WAIT_S: Final = 3.0
_CHECKING: Final[set[Callable[..., VllmConfig]]] = set()
"""The wrappers that ``check_first`` has created."""

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def is_first_process() -> bool:
    """Tell if this process was started by a person or a supervisor, and not by vLLM."""
    return multiprocessing.parent_process() is None


def is_command() -> bool:
    """Tell if this is the ``vllm`` command, and not a program that uses vLLM and may handle its errors."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path(sys.argv[0]).name == "vllm" or (spec is not None and spec.name.startswith("vllm."))


def print_at_end() -> None:
    """Make vLLM's first process print the first noted error when it ends."""
    if os.environ.get(VARIABLE, "").startswith(f"/proc/{os.getpid()}/"):
        return
    try:
        descriptor = os.memfd_create(_FILE)
    except OSError:  # errors are printed as vLLM prints them
        return
    os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"
    atexit.register(_print, descriptor, os.getpid())


def note(error: KVStoreError) -> None:
    """Note an error for printing at the end. It has no effect without a first process, as on another machine."""
    path = Path(os.environ.get(VARIABLE, "/nowhere"))
    try:
        if path.readlink().name.startswith(f"memfd:{_FILE}"):
            with path.open("ab") as file:
                file.write(f"{error}{_END}".encode(errors="replace")[:_MAX_BYTES])
    except OSError:  # the error itself is raised in any case
        return


def noted(call: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Wrap a call so that its errors are noted."""

    @functools.wraps(call)
    def noting(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        try:
            return call(*args, **kwargs)
        except KVStoreError as error:
            note(error)
            raise

    return noting


def as_lines(message: str) -> str:
    """Return a message as it is printed, with a single problem in one line."""
    if message.count("\n") == 1:
        message = message.replace(":\n- ", ": ")
    return MARK + message.replace("\n", f"\n{MARK}")


def check_first(check: Callable[[VllmConfig], None]) -> None:
    """Have vLLM run a check once it has read its flags, before it starts other processes or loads a model.

    vLLM calls no connector that early, so this wraps the method that reads its flags. In a vLLM without that method,
    the same is checked later.
    """
    flags = sys.modules.get("vllm.engine.arg_utils")  # it loads plugins; a process without it reads no flags
    engine_args: Any = getattr(flags, "EngineArgs", None)
    reads = getattr(engine_args, "create_engine_config", None)
    if reads is None or reads in _CHECKING:
        return

    @functools.wraps(reads)
    def create_engine_config(*args: object, **kwargs: object) -> VllmConfig:
        config: VllmConfig = reads(*args, **kwargs)
        try:
            check(config)
        except KVStoreError as error:
            if not is_command():
                raise
            note(error)
            sys.exit(1)
        return config

    _CHECKING.add(create_engine_config)
    engine_args.create_engine_config = create_engine_config


def _print(descriptor: int, process: int) -> None:
    if os.getpid() != process:  # a fork
        return
    first, _, _ = os.pread(descriptor, _MAX_BYTES, 0).decode(errors="replace").partition(_END)
    if first:
        _end_tracker()
        sys.stdout.flush()
        sys.stderr.write(f"{as_lines(first)}\n")
        sys.stderr.flush()


def _end_tracker() -> None:
    """End Python's resource tracker, which would outlive this process, so that its output is printed first."""
    tracker: Any = getattr(resource_tracker, "_resource_tracker", None)
    descriptor, process = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if descriptor is None or process is None:
        return
    tracker._fd = tracker._pid = None  # noqa: SLF001 - it has no public end
    os.close(descriptor)
    deadline_s = time.monotonic() + _TRACKER_WAIT_S
    try:
        while os.waitpid(process, os.WNOHANG) == (0, 0) and time.monotonic() < deadline_s:
            time.sleep(0.02)
    except ChildProcessError:
        return
