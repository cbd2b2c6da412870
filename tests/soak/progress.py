"""Progress of a soak, in a file: each part's counts and failures, which survive a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.model.errors import ConfigError

VERSION = 1
MAX_FAILURES = 10  # of a part: with so many, more of them say nothing new
_MAX_SAMPLES = 4096  # of a server
_MAX_LIVES = 20
_BETTER = "delete it to begin anew, or name another one with --state"


@dataclass(frozen=True)
class Failure:
    """Batch that failed: the seed that repeats it, and its error."""

    seed: int
    what: str


@dataclass
class Tally:
    """Progress of a part.

    Attributes:
        count: things done, in the part's unit.
        batches: batches done; the next one's seed is the soak's first seed and this number.
        wrong: wrong bytes or outputs.
        failed: batches that failed in any other way.
        seconds: time of all batches.
        notes: other sums, by name.
        failures: the first ones.
        memory: for each server that was watched, (seconds since its start, bytes of its own).
    """

    count: int = 0
    batches: int = 0
    wrong: int = 0
    failed: int = 0
    seconds: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    memory: list[list[tuple[float, int]]] = field(default_factory=list)

    @property
    def is_hopeless(self) -> bool:
        """True if it has failed too often to go on."""
        return self.wrong + self.failed >= MAX_FAILURES

    def fail(self, seed: int, what: str) -> None:
        """Count a failure, and keep it if it is one of the first."""
        self.failed += 1
        self.keep(seed, what)

    def keep(self, seed: int, what: str) -> None:
        """Keep a failure that is counted elsewhere, if it is one of the first."""
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(Failure(seed, what[:1000]))

    def begin_life(self) -> None:
        """Begin the samples of another server; those of the last few are kept."""
        self.memory = [*[life for life in self.memory if life][1 - _MAX_LIVES :], []]

    def sample(self, at_s: float, num_bytes: int) -> None:
        """Note a server's memory. Of very many samples every other one is dropped."""
        life = self.memory[-1]
        life.append((at_s, num_bytes))
        if len(life) > _MAX_SAMPLES:
            del life[1::2]


@dataclass
class Progress:
    """Tallies of a soak by the names of its parts, and the file that keeps them."""

    path: Path
    first_seed: int = 1
    tallies: dict[str, Tally] = field(default_factory=dict)

    def of(self, name: str) -> Tally:
        """Return the tally of a part, which is empty at first."""
        return self.tallies.setdefault(name, Tally())

    def save(self) -> None:
        """Replace the file."""
        tree = {
            "version": VERSION,
            "first_seed": self.first_seed,
            "parts": {name: asdict(tally) for name, tally in self.tallies.items()},
        }
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(tree, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)


@contextmanager
def opened(path: Path) -> Iterator[Progress]:
    """Yield the progress in a file, or a new one. No other soak may use the file meanwhile.

    Raises:
        ConfigError: another soak uses it, or it holds something else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another soak uses {path}: wait for it, or name another file with --state") from None
        yield _read(path) if path.exists() else Progress(path)


def _read(path: Path) -> Progress:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["version"] != VERSION:
            raise ConfigError(f"{path} is of version {tree['version']!r}, not {VERSION}: {_BETTER}")
        return Progress(path, int(tree["first_seed"]), {name: _tally(part) for name, part in tree["parts"].items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not the progress of a soak ({error!r}): {_BETTER}") from error


def _tally(tree: dict[str, object]) -> Tally:
    tally = Tally(**tree)  # type: ignore[arg-type] # what does not fit is found here, or below
    tally.failures = [Failure(**failure) for failure in tree["failures"]]  # type: ignore[attr-defined]
    tally.memory = [[(float(at_s), int(size)) for at_s, size in life] for life in tally.memory]
    if not all(type(number) is int for number in (tally.count, tally.batches, tally.wrong, tally.failed)):
        raise TypeError("a count is a whole number")
    return tally
