"""LoRA adapters: files are read off the scheduler's thread, whole only if they have changed, and within a deadline."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from support.gate import HANG_GUARD_S, Gate

from kvstore.adapters.vllm.identity import digest_of as digest_whole
from kvstore.adapters.vllm.requests import adapterfiles, arrivals
from kvstore.adapters.vllm.requests.adapterfiles import Adapter, AdapterFiles, Look
from kvstore.adapters.vllm.requests.arrivals import Arrivals, Known

A_TICK_S = 0.02  # times of files are those of the kernel's last tick


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an adapter that was written some time ago."""
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_config.json").write_text("{}")
    (made / "adapter_model.safetensors").write_bytes(b"12345678")
    return made


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files that were just made count as those that vLLM loads."""
    monkeypatch.setattr(adapterfiles, "_CLOCK_S", -A_TICK_S)


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterFiles]:
    monkeypatch.setattr(adapterfiles, "_SETTLED_S", 0.0)
    made = AdapterFiles()
    yield made
    made.close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the names of files as they are read whole."""
    names: list[str] = []
    digest = digest_whole

    def digest_of(path: Path) -> str:
        names.append(path.name)
        assert threading.current_thread() is not threading.main_thread()
        return digest(path)

    monkeypatch.setattr(adapterfiles, "digest_of", digest_of)
    return names


def named(folder: Path, number: int = 1, *, in_place: bool = False) -> Adapter:
    return Adapter(number, f"adapter {number}", str(folder), in_place)


def ended(look: Look) -> Look:
    assert wait([look], HANG_GUARD_S).done
    return look


def fingerprint(adapters: AdapterFiles, adapter: Adapter) -> str | None:
    return adapters.take(adapter, ended(adapters.look(adapter)))


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_files_are_read_once_and_again_when_they_have_changed(
    adapters: AdapterFiles, folder: Path, read: list[str]
) -> None:
    found = {fingerprint(adapters, named(folder)) for _ in range(5)}
    assert len(found) == 1
    assert found != {None}
    assert read == ["adapter_config.json", "adapter_model.safetensors"]
    touch(folder / "adapter_config.json")
    assert fingerprint(adapters, named(folder)) in found, "only what is in it counts"
    assert read[2:] == ["adapter_config.json"]


def test_what_was_written_just_now_is_read_again(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again without a change of its times."""
    monkeypatch.setattr(adapterfiles, "_SETTLED_S", 3600.0)
    adapters = AdapterFiles()
    assert fingerprint(adapters, named(folder)) == fingerprint(adapters, named(folder))
    assert len(read) == 4
    adapters.close()


def test_the_same_files_elsewhere_are_the_same(adapters: AdapterFiles, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    for path in copy.iterdir():
        touch(path)
    other = AdapterFiles()
    assert fingerprint(adapters, named(folder)) == fingerprint(other, named(copy, 7))
    (copy / "adapter_model.safetensors").write_bytes(b"12345679")
    assert fingerprint(adapters, named(folder)) != fingerprint(other, named(copy, 8))
    other.close()


def test_an_adapter_whose_files_changed_is_never_trusted_again(
    adapters: AdapterFiles, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = fingerprint(adapters, named(folder))
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[::-1])
    assert fingerprint(adapters, named(folder)) is None
    assert "changed" in caplog.text
    weights.write_bytes(content)
    assert fingerprint(adapters, named(folder)) is None
    assert fingerprint(adapters, named(folder, 2)) == found, "another number is loaded anew"


@pytest.mark.parametrize("how", ["in place", "by renaming", "by a link", "by a folder"])
def test_files_replaced_between_the_load_and_the_first_request(
    adapters: AdapterFiles, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """vLLM loads an adapter when it is registered. The next day's is then copied over it, for the next start."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "adapter_model.safetensors").write_bytes(b"87654321")
    link = tmp_path / "current"
    link.symlink_to(folder)
    time.sleep(2 * A_TICK_S)
    adapters.note_load(1)
    time.sleep(2 * A_TICK_S)
    if how == "in place":
        (folder / "adapter_model.safetensors").write_bytes(b"87654321")
    elif how == "by renaming":
        (other / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")
    elif how == "by a link":
        link.unlink()
        link.symlink_to(other)
    else:
        shutil.rmtree(folder)
        other.rename(folder)
    assert fingerprint(adapters, named(link)) is None
    assert "since vLLM loaded it" in caplog.text
    assert fingerprint(adapters, named(link, 2)) is not None, "another number is loaded anew"


@pytest.mark.parametrize(("path", "in_place"), [("nowhere", False), ("adapter", True)])
def test_an_adapter_that_cannot_be_told_is_not_cached(
    adapters: AdapterFiles,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    path: str,
    *,
    in_place: bool,
) -> None:
    assert fingerprint(adapters, named(tmp_path / path, in_place=in_place)) is None
    assert "not cached" in caplog.text
    assert fingerprint(adapters, named(folder)) is None


def test_a_file_that_changes_while_it_is_read_tells_nothing(
    adapters: AdapterFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest_of(path: Path) -> str:
        touch(path)
        return "digest"

    monkeypatch.setattr(adapterfiles, "digest_of", digest_of)
    assert fingerprint(adapters, named(folder)) is None


def test_a_folder_that_hangs_holds_up_no_other_adapter_and_is_asked_once_more_not_a_hundred_times(
    adapters: AdapterFiles, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, digest = Gate(), digest_whole
    other = tmp_path / "other"
    shutil.copytree(folder, other)

    def digest_of(path: Path) -> str:
        if path.parent == folder:
            gate()
        return digest(path)

    monkeypatch.setattr(adapterfiles, "digest_of", digest_of)
    looks = [adapters.look(named(folder)) for _ in range(100)]
    assert gate.reached.wait(HANG_GUARD_S)
    assert len(set(map(id, looks))) == 2
    assert adapters.take(named(folder), looks[0]) is None, "for this request"
    assert fingerprint(adapters, named(other, 2)) is not None
    gate.open()
    assert adapters.take(named(folder), ended(looks[-1])) is not None, "nothing was concluded from the wait"
    assert not adapters._looks


def test_a_look_begins_after_it_was_asked_for(
    adapters: AdapterFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives during a read may mean newer files."""
    gate, digest = Gate(), digest_whole

    def digest_of(path: Path) -> str:
        found = digest(path)
        gate()
        return found

    monkeypatch.setattr(adapterfiles, "digest_of", digest_of)
    first = adapters.look(named(folder))
    assert gate.reached.wait(HANG_GUARD_S)
    (folder / "adapter_config.json").write_text("[]")
    second = adapters.look(named(folder))
    gate.open()
    assert ended(first).result() != ended(second).result()


def test_close_ends_the_threads_and_who_waits_gets_nothing(
    adapters: AdapterFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, digest = Gate(), digest_whole
    monkeypatch.setattr(adapterfiles, "digest_of", gate.before(digest))
    first, second = adapters.look(named(folder)), adapters.look(named(folder))
    assert gate.reached.wait(HANG_GUARD_S)
    adapters.close(timeout_s=0.0)
    gate.open()
    ended(first)
    assert ended(second).result() is None
    assert ended(adapters.look(named(folder))).result() is None
    for thread in threading.enumerate():
        if thread.name == "kvstore-adapters":
            thread.join(HANG_GUARD_S)
            assert not thread.is_alive()


class TestArrivals:
    @pytest.fixture
    def admitted(self) -> list[Known | None]:
        return []

    def test_a_request_waits_until_its_files_are_known(
        self, adapters: AdapterFiles, folder: Path, admitted: list[Known | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate()
        monkeypatch.setattr(adapterfiles, "digest_of", gate.before(digest_whole))
        arriving = Arrivals(adapters, HANG_GUARD_S)
        assert arriving.is_admitted("without an adapter")
        arriving.add("one", named(folder), [], admitted.append)
        for _ in range(3):
            assert not arriving.is_admitted("one")
            arriving.end_pass()
        assert not admitted
        gate.open()
        wait(arriving._waiting["one"].missing(), HANG_GUARD_S)
        assert arriving.is_admitted("one")
        assert arriving.is_admitted("one")
        assert admitted == [Known(fingerprint(adapters, named(folder)) or "never")]

    def test_one_that_has_waited_too_long_does_without_the_cache(
        self, adapters: AdapterFiles, folder: Path, admitted: list[Known | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert fingerprint(adapters, named(folder)) is not None
        touch(folder / "adapter_config.json")
        gate = Gate()
        monkeypatch.setattr(adapterfiles, "digest_of", gate.before(digest_whole))
        arriving = Arrivals(adapters, 0.0)
        arriving.add("late", named(folder), [], admitted.append)
        assert arriving.is_admitted("late")
        assert admitted == [None]
        gate.open()

    def test_one_that_is_gone_is_forgotten(
        self, adapters: AdapterFiles, folder: Path, admitted: list[Known | None]
    ) -> None:
        arriving = Arrivals(adapters, HANG_GUARD_S)
        arriving.add("gone", named(folder), [], admitted.append)
        arriving.end("gone")
        assert arriving.is_admitted("gone")
        assert not admitted
        assert not arriving._waiting

    def test_all_requests_of_a_pass_wait_once(
        self, adapters: AdapterFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, waits = Gate(), list[float]()
        monkeypatch.setattr(adapterfiles, "digest_of", gate.before(digest_whole))

        def wait_for(_: object, timeout_s: float) -> None:
            waits.append(timeout_s)
            time.sleep(timeout_s)

        monkeypatch.setattr(arrivals, "wait_for", wait_for)
        arriving = Arrivals(adapters, HANG_GUARD_S)
        for _ in range(2):
            for number in range(20):
                arriving.add(f"{number}", named(folder), [], lambda _: None)
                assert not arriving.is_admitted(f"{number}")
            arriving.end_pass()
        assert waits == [arrivals.PASS_BUDGET_S] * 2
        gate.open()
