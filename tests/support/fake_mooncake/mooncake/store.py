"""Stand-in for Mooncake's client, with its codes, in the memory of one process.

The environment variable FAKE_MOONCAKE names a folder. While it has a file ``hang-<call>``, calls wait where
Mooncake's hang: before a read has written its buffer, or before a write has read it. With ``die`` the process ends.
With ``fail-get`` reads fail, and write other bytes when ``late-get`` is gone.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path


class MooncakeDistributedStore:
    """A store without a bound. With the file ``full`` it takes nothing, and with ``down`` there is none."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["FAKE_MOONCAKE"])
        self._objects: dict[str, bytes] = {}
        self._sent: dict[str, bytes] = {}

    def _wait(self, call: str) -> None:
        if (self._folder / "die").exists():
            os._exit(9)
        while (self._folder / f"hang-{call}").exists():
            time.sleep(0.005)

    def setup(self, *_: object) -> int:
        self._wait("setup")
        return -1 if (self._folder / "down").exists() else 0

    def register_buffer(self, _address: int, _size_bytes: int) -> int:
        return 0

    def allocate_and_mount_segment(self, size: int, _protocol: str) -> dict[str, object]:
        self._wait("give")
        (self._folder / f"given-{os.getpid()}").write_text(str(size))
        return {"ret": -1 if (self._folder / "refuse").exists() else 0}

    def close(self) -> int:
        (self._folder / f"given-{os.getpid()}").unlink()
        return 0

    def batch_get_into(self, keys: Sequence[str], places: Sequence[int], sizes: Sequence[int]) -> list[int]:
        self._wait("get")
        return [self._get(*one) for one in zip(keys, places, sizes, strict=True)]

    def get_into(self, key: str, place: int, size: int) -> int:
        if not key.endswith(":epoch"):
            self._wait("get")
            if self._fails(place, size):
                return -800
        return self._get(key, place, size)

    def _fails(self, place: int, size: int) -> bool:
        for failure in ("fail-get", "raise-get"):
            if (self._folder / failure).exists():
                threading.Thread(target=self._write_late, args=(place, size), daemon=True).start()
                if failure == "raise-get":
                    raise MemoryError("in the middle of a transfer")
                return True
        return False

    def _write_late(self, place: int, size: int) -> None:
        while (self._folder / "late-get").exists():
            time.sleep(0.005)
        ctypes.memset(place, 0xEE, size)
        (self._folder / "written").touch()

    def _get(self, key: str, place: int, size: int) -> int:
        value = self._objects.get(key)
        if value is None or len(value) > size:
            return -704 if value is None else -600
        ctypes.memmove(place, value, len(value))
        return len(value)

    def get_into_ranges(
        self,
        places: list[int],
        keys: list[list[str]],
        targets: list[list[list[int]]],
        sources: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        self._wait("get")
        found = []
        for place, (key,), (begins,), (offsets,), (lengths,) in zip(places, keys, targets, sources, sizes, strict=True):
            if self._fails(place, max(map(sum, zip(begins, lengths, strict=True)))):
                found.append([[-800] * len(lengths)])
                continue
            value = self._objects.get(key)
            codes = []
            for target, source, length in zip(begins, offsets, lengths, strict=True):
                if value is not None and source + length <= len(value):
                    ctypes.memmove(place + target, value[source : source + length], length)
                    codes.append(length)
                else:
                    codes.append(-704 if value is None else -600)
            found.append([codes])
        return found

    def batch_upsert_from(self, keys: Sequence[str], places: Sequence[int], sizes: Sequence[int]) -> list[int]:
        self._wait("put")
        return [self._put(*one) for one in zip(keys, places, sizes, strict=True)]

    def upsert_from(self, key: str, place: int, size: int) -> int:
        if not key.endswith(":epoch"):
            self._wait("put")
        return self._put(key, place, size)

    def _put(self, key: str, place: int, size: int) -> int:
        if (self._folder / "full").exists():
            return -200
        if key.endswith(":epoch"):
            self._wait("epoch")
        if key.endswith(":epoch") and (self._folder / "fail-epoch").exists():
            return -800
        if key.endswith(":epoch") and (self._folder / "raise-epoch").exists():
            raise MemoryError("in the middle of a transfer")
        self._objects[key] = ctypes.string_at(place, size)
        return 0

    def batch_put_session_start(self, keys: Sequence[str], _sizes: Sequence[int]) -> list[int]:
        found = [-705 if key in self._objects else -200 if (self._folder / "full").exists() else 0 for key in keys]
        return [-1 if (self._folder / "no-session").exists() else code for code in found]

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], places: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        self._wait("put")
        assert offsets == [[0]] * len(keys)
        if (self._folder / "fail-put").exists():
            return [-800] * len(keys)
        for key, (place,), (size,) in zip(keys, places, sizes, strict=True):
            self._sent[key] = ctypes.string_at(place, size)
        return [size for (size,) in sizes]

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        if (self._folder / "overtake").exists():
            return [-601] * len(keys)
        codes = [0 if key in self._sent else -704 for key in keys]
        self._objects.update({key: self._sent.pop(key) for key in keys if key in self._sent})
        return codes

    def put_from(self, key: str, place: int, size: int) -> int:
        return 0 if key in self._objects else self._put(key, place, size)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        self._wait("exist")
        return [int(key in self._objects) for key in keys]

    def batch_remove(self, keys: Sequence[str], _force: bool) -> list[int]:
        return [0 if self._objects.pop(key, None) is not None else -704 for key in keys]

    def remove_by_regex(self, pattern: str, _force: bool) -> int:
        dead = [key for key in self._objects if re.match(pattern, key)]
        for key in dead:
            del self._objects[key]
        return len(dead)
