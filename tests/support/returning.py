"""An engine whose remote tier is missing at its start, and appears later."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvstore.transfer.lane import Flushed
from support.checks import check_idle
from support.rig import Rig, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from kvstore.engine.options import RemoteOptions

TOKENS = tokens_of(1, 40)
WAIT_S = 30.0


def check_return(
    rig: Rig, caplog: pytest.LogCaptureFixture, remote: RemoteOptions, start: Callable[[], object]
) -> None:
    """Check that there is one warning, and that the cache works without the tier and then with it."""
    with caplog.at_level(logging.INFO), rig.open(remote=remote) as engine:
        assert "the remote tier cannot be used now" in caplog.text
        assert rig.store(engine, TOKENS) == 40
        assert rig.retrieve(engine, TOKENS) == 40
        assert engine.flush(WAIT_S) == Flushed(failed=3)
        start()
        deadline_s = time.monotonic() + WAIT_S
        while not engine.stats().index.sends_done and time.monotonic() < deadline_s:
            rig.store(engine, tokens_of(2, 16))  # known by now, but not sent
            engine.flush(WAIT_S)
            time.sleep(0.1)
        assert engine.stats().index.sends_done
        check_idle(engine)
