"""Processes that tools start end with the block that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.tools.processes import free_port, is_listening, running, wait_until

LISTENER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_its_block() -> None:
    port = free_port()
    assert not is_listening(port)
    with running([sys.executable, "-c", LISTENER, str(port)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert is_listening(port)
    assert process.returncode == -9
    assert process.stdout.closed
    assert not is_listening(port)


def test_a_process_ends_with_an_error_in_its_block() -> None:
    with pytest.raises(ZeroDivisionError), running([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        raise ZeroDivisionError
    assert process.returncode == -9


def test_waiting_ends_with_yes_or_with_the_time() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 60.0, every_s=0.0)
    assert not wait_until(lambda: False, 0.01, every_s=0.001)
