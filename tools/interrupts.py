"""Ctrl-C in commands that take long: what is under way is finished, what was finished stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvstore.tools.processes import handled

INTERRUPTED = 130
ShouldStop = Callable[[], bool]
"""Asked before each piece of work; true once it is the last one that was done."""


class Interruption(KeyboardInterrupt):
    """The first Ctrl-C during work that ends at once: a measurement, whose servers Ctrl-C on a terminal ends, too."""


def never() -> bool:
    """For callers that nobody interrupts."""
    return False


@contextmanager
def interruptible(finishing: str, *, at_once: bool = False) -> Iterator[ShouldStop]:
    """Let the first SIGINT or SIGTERM end a run after the piece of work under way, and the second one end it now.

    The first one says what is finished. Until the run asks for the first time whether to stop, it has done nothing, and
    one signal ends it. What ends now raises ``KeyboardInterrupt``, with which commands exit with 130.

    Args:
        finishing: what happens after the first signal, for people.
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
    """Let SIGHUP, which the end of a terminal sends, end no server. For the main thread."""
    signal.signal(signal.SIGHUP, lambda *_: tell("SIGHUP is ignored: a restart reads the configuration again"))


def tell(line: str) -> None:
    """Write a line to standard error; a signal's handler may have interrupted whoever writes there through Python."""
    clear = "\r\x1b[2K" if os.isatty(2) else ""  # of a bar, which is drawn again below
    with suppress(OSError):  # a terminal that is gone
        os.write(2, f"{clear}{line}\n".encode())
