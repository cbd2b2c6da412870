"""Examples of the configuration load, and its documentation agrees with the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.doc_tables import key_list, section

from kvstore.config import load_config
from kvstore.config.reference import KEYS
from kvstore.config.sources import OTHER_VARIABLES
from kvstore.model.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = sorted((REPOSITORY / "config/examples").glob("*.yaml"))
DOCUMENT = REPOSITORY / "docs/configuration.md"
FLAG = (
    "--kv-transfer-config "
    '\'{"kv_connector":"KVStoreConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}\''
)


class TestExamples:
    @pytest.mark.parametrize("example_file", EXAMPLES, ids=lambda path: path.stem)
    def test_loads_and_shows_the_flag(self, example_file: Path) -> None:
        loaded = load_config(path=example_file, environ={})
        assert bool(loaded.warnings) == (example_file.stem == "from-lmcache")
        assert FLAG in example_file.read_text()

    def test_are_the_six_that_the_documentation_names(self) -> None:
        names = ["cpu-and-disk", "cpu", "from-lmcache", "pack", "redis", "server"]
        assert [path.stem for path in EXAMPLES] == names

    def test_cpu_and_disk(self) -> None:
        config = load_config(path=EXAMPLES[0], environ={}).config
        assert config.local_cpu
        assert config.local_disk == str(Path.home() / ".cache/kvstore")
        assert config.max_local_disk_bytes == 20 * 2**30

    def test_from_lmcache(self) -> None:
        loaded = load_config(path=EXAMPLES[2], environ={})
        assert loaded.config.local_disk == "/var/tmp/kvstore"
        assert loaded.config.use_odirect is True
        named = {line.split(": ")[1] for line in loaded.warnings}
        assert named == {
            "pre_caching_hash_algorithm",
            "save_only_first_rank",
        }


class TestDocumentation:
    def test_the_list_of_keys_is_the_schema(self) -> None:
        assert section(DOCUMENT.name, "keys") == key_list()

    def test_variables_that_are_read_elsewhere_are_listed(self) -> None:
        for variable in OTHER_VARIABLES:
            assert f"`{variable}`" in DOCUMENT.read_text()

    def test_every_key_has_a_meaning(self) -> None:
        assert all(reference.meaning.endswith(".") for reference in KEYS.values())

    def test_the_transcript_is_real(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        path = Path("kv.yaml")
        text = section(DOCUMENT.name, "transcript-file").removeprefix("```yaml\n").removesuffix("```")
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path=path, environ={"KVSTORE_DISK_IO_THREADS": "four"})
        assert section(DOCUMENT.name, "transcript-error") == f"```text\n{caught.value}\n```"
        path.write_text(text.splitlines()[-1])
        (warning,) = load_config(path=path, environ={}).warnings
        assert section(DOCUMENT.name, "transcript-warning").replace("line 4", "line 1") == f"```text\n{warning}\n```"


def test_importing_the_configuration_imports_neither_torch_nor_a_second_copy() -> None:
    code = "import sys, kvstore.config; print(sorted({name.split('.')[0] for name in sys.modules}))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'torch'" not in names
    assert "'config'" not in names
