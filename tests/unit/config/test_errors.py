"""Configurations that are refused, with a message that names the place, the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvstore.config import LoadedConfig, StoreConfig, load_config
from kvstore.config.reference import KEYS
from kvstore.model.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kv.yaml"


def load_text(file: Path, text: str | bytes) -> LoadedConfig:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path=file, environ={})


def problems_of(file: Path, text: str | bytes) -> list[str]:
    """Return the lines of the error for a file, without the file's name."""
    with pytest.raises(ConfigError) as caught:
        load_text(file, text)
    header, *lines = str(caught.value).splitlines()
    assert header == "the configuration cannot be used:"
    assert all(line.startswith(f"- file {file}") for line in lines)
    return [line.removeprefix(f"- file {file}").removeprefix(", ").removeprefix(": ") for line in lines]


def extra_problem(extra: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(extra, environ={})
    return str(caught.value)


class TestFolder:
    @pytest.mark.parametrize(
        ("text", "folder"),
        [
            ("/data/kv/", "/data/kv"),
            ("file:///data/kv/", "/data/kv"),
            ("file://localhost/data", "/data"),
            ("file:///data/a%20b", "/data/a b"),
            ("FILE:///data", "/data"),
            ("relative/kv", str(Path.cwd() / "relative/kv")),
            ("~/kv", str(Path.home() / "kv")),
        ],
    )
    def test_is_made_absolute(self, text: str, folder: str) -> None:
        assert StoreConfig(local_disk=text, max_local_disk_size=1).local_disk == folder

    @pytest.mark.parametrize(
        ("value", "part"),
        [
            (True, "true: must be a folder, not true or false"),
            (False, "false: must be a folder, not true or false"),
            (7, "must be text"),
            ("", '"": must be the path of a folder'),
            ("s3://bucket/x", "other addresses are no folder"),
            ("file://", "three slashes"),
            ("file://folder/", "three slashes"),
            ("/a,/b", "must have no comma in its name; several folders are written as a list"),
            ([], "a list of 0: must name a folder"),
            (["/a", "/b", "/a/"], "a list of 3: must not name a folder twice"),
            (["/a", 7], "must be text"),
            (["/a", "s3://bucket"], "other addresses are no folder"),
            ("~no-such-user/x", "existing user"),
            ("/a\0b", "must be the path of a folder"),
        ],
    )
    def test_what_is_refused(self, value: object, part: str) -> None:
        message = extra_problem({"kvstore.local_disk": value, "kvstore.max_local_disk_size": 1})
        assert "kv_connector_extra_config kvstore.local_disk: local_disk: " in message
        assert part in message

    def test_several(self, file: Path) -> None:
        config = load_text(file, "local_disk: [/a/, 'file:///b']\nmax_local_disk_size: 1").config
        assert config.local_disk == config.local_disk_folders == ("/a", "/b")
        config = load_text(file, "local_disk: [/a/]\nmax_local_disk_size: 1").config
        assert (config.local_disk, config.local_disk_folders) == ("/a", ("/a",))
        assert StoreConfig().local_disk_folders == ()

    def test_needs_a_size(self, file: Path) -> None:
        (line,) = problems_of(file, "local_cpu: true\nlocal_disk: /data")
        assert line.startswith("line 2: max_local_disk_size: 0.0: must be greater than 0 because local_disk is set")
        (line,) = problems_of(file, "local_disk: /data\nmax_local_disk_size: 0")
        assert line.startswith("line 2: max_local_disk_size: 0: must be greater than 0")

    def test_size_without_folder_warns(self, file: Path) -> None:
        (warning,) = load_text(file, "max_local_disk_size: 3").warnings
        assert warning.startswith(f"file {file}, line 1: max_local_disk_size: ignored: local_disk is not set")

    def test_no_tier_at_all_warns(self) -> None:
        (warning,) = load_config({"kvstore.local_cpu": False}, environ={}).warnings
        assert warning.endswith("nothing will be kept")


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("chunk_sise: 512", "chunk_sise: 512: unknown key; did you mean chunk_size?"),
            ("Chunk_Size: 512", "Chunk_Size: 512: unknown key; did you mean chunk_size?"),
            ("remote_uri: x", 'remote_uri: "x": unknown key; did you mean remote_url?'),
            ("extraconfig: {}", "extraconfig: a mapping of 0: unknown key; did you mean extra_config?"),
            ("7: 1", f"7: 1: unknown key; valid keys are {', '.join(KEYS)}"),
            ("chunk_size: '256'", 'chunk_size: "256": must be a whole number of tokens, such as 256, in digits and'),
            ("chunk_size: 256.0", "chunk_size: 256.0: must be a whole number of tokens, such as 256"),
            ("chunk_size: true", "chunk_size: true: must be a whole number of tokens, such as 256"),
            ("chunk_size: 0", "chunk_size: 0: must be greater than 0"),
            ("chunk_size:", "chunk_size: null: must be a whole number"),
            ("local_cpu: 'yes'", 'local_cpu: "yes": must be true or false'),
            ("local_cpu: 1", "local_cpu: 1: must be true or false"),
            ("max_local_cpu_size: .nan", "max_local_cpu_size: nan: must be a finite number"),
            ("max_local_cpu_size: .inf", "max_local_cpu_size: inf: must be a finite number"),
            ("max_local_cpu_size: -1", "max_local_cpu_size: -1: must be greater than 0"),
            (
                "max_local_cpu_size: 21474836480",
                "max_local_cpu_size: 21474836480: looks like bytes; GiB are expected, such",
            ),
            (
                "max_local_gpu_size: 2097152",
                "max_local_gpu_size: 2097152: looks like KB or MB; GiB are expected, such as 2",
            ),
            ("pd_buffer_size: 4", "pd_buffer_size: 4: looks like GiB; bytes are expected, such as 4294967296"),
            (
                "blocking_timeout_secs: 10s",
                'blocking_timeout_secs: "10s": must be a number of seconds, such as 10.0, w',
            ),
            ("max_write_queue: many", 'max_write_queue: "many": must be a whole number of chunks, in digits'),
            ("disk_io_threads: 65", "disk_io_threads: 65: must be less than or equal to 64"),
            ("extra_config: {disk_io_threads: 0}", "in extra_config: disk_io_threads: 0: must be greater than or eq"),
            ("extra_config: [a]", "extra_config: a list of 1: must be a mapping of keys to values"),
            ("model_id: 2024-01-01", "model_id: 2024-01-01: must be text: write it in quotes"),
            ("model_id: ''", 'model_id: "": must have at least 1 character'),
        ],
    )
    def test_one_value(self, file: Path, text: str, line: str) -> None:
        (actual,) = problems_of(file, text)
        assert actual.removeprefix("line 1").lstrip(":, ").startswith(line)

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("max_cpu_size", "max_local_cpu_size"),
            ("disk_size", "max_local_disk_size"),
            ("ssd_dir", "local_disk"),
            ("redis_url", "remote_url"),
            ("redis_password", "remote_password"),
            ("chunk_tokens", "chunk_size"),
            ("disk_codec", "local_disk_serde"),
            ("eviction_policy", "cache_policy"),
            ("maxLocalCpuSize", "max_local_cpu_size"),
            ("enable_controler", "enable_controller"),
        ],
    )
    def test_the_nearest_key_by_meaning(self, file: Path, key: str, meant: str) -> None:
        (line,) = problems_of(file, f"{key}: 1")
        assert line.endswith(f"unknown key; did you mean {meant}?")

    @pytest.mark.parametrize(("size", "count"), [(20480, 1), (4095, 0)])
    def test_a_size_that_is_rather_one_of_megabytes_warns(self, file: Path, size: int, count: int) -> None:
        warnings = load_text(file, f"max_local_cpu_size: {size}").warnings
        assert [line.endswith("looks like MB; GiB are expected, such as 20") for line in warnings] == [True] * count

    @pytest.mark.parametrize("size", ["5GB", "5 GiB", "0.5 TB"])
    def test_a_size_with_a_unit(self, file: Path, size: str) -> None:
        (line,) = problems_of(file, f"max_local_cpu_size: {size}")
        assert "of GiB per worker" in line
        assert line.endswith("without a unit")

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("a: [1\nb: 2", "not valid YAML: line 2, column 2: while parsing a flow sequence"),
            ("\tchunk_size: 1", "not valid YAML: line 1, column 1: while scanning for the next token"),
            ("a: 1\n---\nb: 2", "not valid YAML: line 2, column 1: expected a single document"),
            ("a: &x 1\nb: *x", "not valid YAML: line 2, column 4: aliases (*name) are not supported"),
            ("a: !!python/name:os.system x", "not valid YAML: line 1, column 4: could not determine a constructor"),
            ("a: 2024-13-45", "not valid YAML: line 1, column 4: this value is malformed"),
            ("a: !!bool maybe", "not valid YAML: line 1, column 4: this value is malformed"),
            ("[" * 1000, "not valid YAML: it is nested too deeply"),
            (b"\xff\xfea", "not valid YAML: "),
            (b"a: \x00", "not valid YAML: special characters are not allowed (at position 3)"),
            ("just words", "must hold `key: value` lines"),
            ("- chunk_size", "must hold `key: value` lines"),
            (b"#" * (2**20 + 1), "larger than 1 MiB"),
        ],
    )
    def test_no_configuration(self, file: Path, text: str | bytes, line: str) -> None:
        (actual,) = problems_of(file, text)
        assert actual.startswith(line)

    def test_missing_file(self, tmp_path: Path) -> None:
        environ = {"KVSTORE_CONFIG_FILE": str(tmp_path / "none.yaml")}
        with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file or directory"):
            load_config(environ=environ)

    @pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/tmp")])
    def test_not_a_regular_file(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="not a regular file"):
            load_config(path=path, environ={})

    def test_duplicate_keys(self, file: Path) -> None:
        text = "chunk_size: 1\nextra_config:\n  use_odirect: true\n  use_odirect: false\nchunk_size: 2"
        assert problems_of(file, text) == [
            "line 4: use_odirect: given more than once: keep one",
            "line 5: chunk_size: given more than once: keep one",
        ]

    def test_all_problems_at_once_in_the_order_of_the_lines(self, file: Path) -> None:
        lines = ["chunk_size: x", "local_disk: /d", *(f"unknown_{number}: 1" for number in range(9)), "local_cpu: 3"]
        problems = problems_of(file, "\n".join(lines))
        assert [int(line.split(":")[0].removeprefix("line ")) for line in problems] == list(range(1, 13))

    def test_problems_of_all_sources_at_once(self, file: Path) -> None:
        file.write_text("chunk_size: x")
        with pytest.raises(ConfigError) as caught:
            load_config({"lmcache.nothing_like_it": 1}, path=file, environ={"KVSTORE_LOCAL_CPU": "x"})
        message = str(caught.value)
        assert message.count("\n") == 3
        for part in (f"file {file}, line 1", "environment KVSTORE_LOCAL_CPU", "lmcache.nothing_like_it"):
            assert part in message

    def test_nested_extra_config_is_refused(self) -> None:
        assert 'written flat, as JSON: {"kvstore.chunk_size": 256}' in extra_problem({"kvstore": {"chunk_size": 1}})

    def test_secrets_are_not_shown(self, file: Path) -> None:
        text = (
            "redis_password: hunter2\nhf_token: hunter2\nremote_uri: redis://me:hunter2@host:1\n"
            "redis: {password: hunter2}\nextra_config: me:hunter2@host\nchunk_size: redis://:hun/ter2@host\n"
        )
        message = "\n".join(problems_of(file, text))
        assert message.count("\n") == 5
        assert "ter2" not in message
        assert 'remote_uri: "redis://***@host:1"' in message

    def test_long_and_unprintable_values_stay_on_one_line(self, file: Path) -> None:
        (line,) = problems_of(file, 'chunk_size: "' + "a\\n" * 1000 + '"')
        assert len(line) < 300
        (line,) = problems_of(file, "chunk_size: -" + "9" * 4000)
        assert "a very large number" in line

    def test_the_model_is_frozen_and_closed(self) -> None:
        config = StoreConfig()
        with pytest.raises(ValidationError):
            config.chunk_size = 1
        with pytest.raises(ValidationError):
            StoreConfig(nothing=1)  # type: ignore[call-arg]

    def test_sizes_in_bytes(self) -> None:
        config = StoreConfig(max_local_cpu_size=0.5, local_disk="/d", max_local_disk_size=2)
        assert (config.max_local_cpu_bytes, config.max_local_disk_bytes) == (2**29, 2**31)
