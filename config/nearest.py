"""Suggestion of the valid key meant by an unknown one, by common words, synonyms and letters.

By letters alone ``max_cpu_size`` would be closest to the memory of a GPU. Words used in fewer keys weigh more.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvstore.config.lmcache import EXTRA_CONFIG, NOT_IMPLEMENTED
from kvstore.config.reference import KEYS

_MIN_LIKENESS: Final = 0.6
_MIN_LIKENESS_OF_LMCACHE: Final = 1.6  # a key without effect must match almost exactly
_MAX_CHARACTERS: Final = 80
_MIN_LETTERS: Final = 0.8  # likeness from which a word counts as a misspelling of another
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")

_SYNONYMS: Final = {
    "cpu": "ram mem memory host dram",
    "gpu": "device vram hbm cuda",
    "disk": "ssd nvme storage fs file folder dir directory path",
    "remote": "redis shared valkey",
    "url": "uri address addr endpoint",
    "size": "gb gib bytes capacity limit length len tokens",
    "chunk": "block page",
    "serde": "codec compression compress quantization",
    "secs": "sec seconds s",
    "ms": "millis milliseconds",
    "policy": "eviction evict strategy",
    "password": "passwd pass auth",
    "username": "user login",
    "timeout": "deadline wait",
    "ttl": "expiry expire expiration lifetime",
    "layerwise": "layer layers",
    "async": "asynchronous background",
    "threads": "workers concurrency",
    "peers": "peer p2p neighbours neighbors",
    "pd": "disagg disaggregated prefill decode nixl",
    "required": "mandatory strict",
    "loading": "load read reads",
    "saving": "save store write writes",
}
_MEANS: Final = {word: meant for meant, words in _SYNONYMS.items() for word in words.split()}


def nearest_key(key: str) -> str | None:
    """Return the valid key most likely meant by ``key``: one of ours, unless one of LMCache's is clearly meant."""
    key = key[:_MAX_CHARACTERS]
    ours = max((_likeness(key, name), name) for name in (*KEYS, EXTRA_CONFIG))
    theirs = max((_likeness(key, name), name) for name in NOT_IMPLEMENTED)
    if theirs[0] >= max(ours[0], _MIN_LIKENESS_OF_LMCACHE):
        return theirs[1]
    return ours[1] if ours[0] >= _MIN_LIKENESS else None


def misspelt_key(key: str) -> str | None:
    """Return our key of which ``key`` is a misspelling, by letters alone; None if there is none."""
    return next(iter(difflib.get_close_matches(key[:_MAX_CHARACTERS], KEYS, n=1)), None)


def _likeness(key: str, name: str) -> float:
    """Return the likeness from 0 to 2: the sum of that of letters and that of words."""
    letters = difflib.SequenceMatcher(None, key.lower(), name).ratio()
    return letters + _common(_words(key), _words(name))


def _words(key: str) -> set[str]:
    return {_MEANS.get(word, word) for word in map(str.lower, _WORD.findall(key))}


def _common(given: set[str], wanted: set[str]) -> float:
    """Return the weighted share of the words that both have."""
    same = {word for word in wanted if word in given or difflib.get_close_matches(word, given, 1, _MIN_LETTERS)}
    others = {word for word in given if not difflib.get_close_matches(word, wanted, 1, _MIN_LETTERS)}
    whole = _weight(wanted) + _weight(others)
    return _weight(same) / whole if whole else 0.0


def _weight(words: Iterable[str]) -> float:
    return sum(math.log(len(_KEY_WORDS) / _COUNTS.get(word, 1)) for word in words)


_KEY_WORDS: Final = [_words(key) for key in KEYS]
_COUNTS: Final = Counter(word for words in _KEY_WORDS for word in words)
