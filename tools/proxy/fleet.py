"""Engines of a proxy, which may be added and removed while it runs, if a file names them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from kvstore.model.errors import ConfigError
from kvstore.tools.proxy.choice import Rota
from kvstore.tools.proxy.engines import Engine
from kvstore.tools.proxy.listing import Listed
from kvstore.tools.proxy.options import ProxyOptions
from kvstore.tools.proxy.upstream import Pool, Times

logger = logging.getLogger(__name__)

_Version = tuple[int, int, int]


class Fleet:
    """Engines of both roles, for use on one event loop.

    Attributes:
        prefill: engines that compute prompts.
        decode: engines that answer.
        is_outdated: whether the changed file is invalid, so that the engines of the last valid one stay.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self.prefill: Rota[Engine] = Rota(())
        self.decode: Rota[Engine] = Rota(())
        self.is_outdated = False
        self._options = options
        self._times = Times(options.connect_timeout_s, options.timeout_s)
        self._context = options.engine_context()
        self._leaving: list[Engine] = []
        self._watches: dict[Engine, asyncio.Task[None]] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines, including those removed from the file whose last request has not ended."""
        self._leaving = [engine for engine in self._leaving if engine.load]
        return (*self._leaving, *self.prefill.engines, *self.decode.engines)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Check the engines once, then periodically until the end of the block; then close all connections."""
        version = self._version()
        await self._take_in()
        follower = asyncio.create_task(self._follow(version))
        try:
            yield
        finally:
            tasks = (follower, *self._watches.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for engine in self.engines:
                engine.close()

    async def _follow(self, version: _Version | None) -> None:
        """Reload the file whenever it has changed."""
        while self._options.engines_file is not None:
            await asyncio.sleep(self._options.health_interval_s)
            now = self._version()
            if now == version:
                continue
            version = now
            try:
                await self._take_in()
                self.is_outdated = False
            except ConfigError as error:
                self.is_outdated = True
                logger.error("the engines stay as they are: %s", error)  # noqa: TRY400 - the message says it all

    async def _take_in(self) -> None:
        """Load the listed engines; new ones get a health check before their first request.

        Raises:
            ConfigError: the listing is invalid.
        """
        listing = await asyncio.to_thread(self._options.listing)
        prefill = self._engines("prefill", self.prefill, listing.prefill)
        decode = self._engines("decode", self.decode, listing.decode)
        old, new = {*self.prefill.engines, *self.decode.engines}, {*prefill, *decode}
        await asyncio.gather(*(engine.check() for engine in new - old))
        self.prefill.replace(prefill)
        self.decode.replace(decode)
        for engine in new - old:
            self._watches[engine] = asyncio.create_task(self._watch(engine))
        for engine in old - new:
            self._watches.pop(engine).cancel()
            engine.close()
            self._leaving.append(engine)
            logger.info("%s engine %s gets no more requests; it has %d", engine.role, engine.url, engine.load)

    def _engines(self, role: str, rota: Rota[Engine], listed: Iterable[Listed]) -> list[Engine]:
        known = {(engine.url, engine.receiver): engine for engine in rota.engines}
        engines = []
        for one in listed:
            engine = known.get((one.url, one.receiver))
            if engine is None:
                engine = Engine(role, one, Pool(one.url, self._times, self._context))
            engine.weight = one.weight
            engines.append(engine)
        return engines

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._options.health_interval_s)
            await engine.check()

    def _version(self) -> _Version | None:
        """Return inode, modification time and size of the file; None if there is no file."""
        if self._options.engines_file is None:
            return None
        try:
            found = self._options.engines_file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
