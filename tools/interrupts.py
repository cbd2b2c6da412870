"""Ctrl-C in long-running commands: the current piece of work is finished, and finished work is kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvstore.tools.processes import handled

INTERRUPTED = 130
ShouldStop = Callable[[], bool]
"""Callback before each piece of work; it returns True once the run should stop."""


class Interruption(KeyboardInterrupt):
    """First Ctrl-C during work that stops at once: a measurement, whose servers a terminal's Ctrl-C ends as well."""


def never() -> bool:
    """Return False, for callers that are never interrupted."""
    return False


@contextmanager
def interruptible(finishing: str, *, at_once: bool = False) -> Iterator[ShouldStop]:
    """Let the first SIGINT or SIGTERM end a run after the current piece of work, and the second one end it now.

    The first signal prints a message. Until the run first calls ``should_stop``, it has done nothing, and one signal
    ends it. A run that ends now raises ``KeyboardInterrupt``, with which commands exit with 130.

    Args:
        finishing: action after the first signal, for the message.
        at_once: raise ``Interruption`` at the first signal.
    """
    has_begun, is_stopped = at_once, False

    def should_stop() -> bool:
        nonlocal has_begun
        has_begun = True
        return is_stopped

    def stop(_number: int, _frame: object) -> None:
        nonlocal is_stopped
        if is_stopped:
            raise KeyboardInterrupt
        is_stopped = True
        tell(f"interrupted: {finishing}; Ctrl-C again ends now" if has_begun else "interrupted: nothing was done yet")
        if at_once:
            raise Interruption
        if not has_begun:
            raise KeyboardInterrupt

    with handled((signal.SIGINT, signal.SIGTERM), stop):
        yield should_stop


def ignore_hangup() -> None:
    """Ignore SIGHUP, which a closing terminal sends, so that it ends no server. Call it on the main thread."""
    signal.signal(signal.SIGHUP, lambda *_: tell("SIGHUP is ignored"))


def tell(line: str) -> None:
    """Write a line to standard error by ``os.write``, as a signal handler may have interrupted a buffered write."""
    clear = "\r\x1b[2K" if os.isatty(2) else ""  # clears a progress bar, which is drawn again below
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"{clear}{line}\n".encode())
