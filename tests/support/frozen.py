"""Programs of tests that can be stopped and continued, as if they hung."""

from __future__ import annotations

import signal
import subprocess
from typing import Any


class Freezable:
    """A program that may run.

    Attributes:
        process: the program; None while it does not run.
    """

    process: subprocess.Popen[Any] | None = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, also if it is stopped, and wait for its end."""
        if self.process is not None:
            self.thaw()
            self.process.kill()
            self.process.communicate()
            self.process = None
