"""Replacements for resources that a page names and this machine lacks, and blocks that are not run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvstore.tools.dev.pages.blocks import COMMANDS, Block


class StandIn(NamedTuple):
    """Replacement in text before it is run; ``{model}`` and ``{folder}`` are the model's folder and the page's."""

    pattern: str
    replacement: str
    why: str


STAND_INS: Final = (
    StandIn(r"meta-llama/Llama-3\.1-8B-Instruct|\bMODEL\b", "{model}", "16 GB: a random Llama of 14 MB is there"),
    StandIn(
        r"\bvllm serve (\S+)(?!.*--port)",
        r"vllm serve \1 --port 8000",
        "vLLM's own default, so that the port can be another",
    ),
    StandIn(
        r"\bvllm serve (\S+)",
        r"vllm serve \1 --dtype float32 --block-size 32 --max-model-len 8192 --enforce-eager",
        "a machine without a GPU, and no time to compile",
    ),
    StandIn(r"(block.size\D{1,3})16\b", r"\g<1>32", "vLLM's kernels on a CPU"),
    StandIn(r"kvstore probe$", "kvstore probe --url http://127.0.0.1:8000", "its default, as above"),
    StandIn(r"redis-server(?= --)", "redis-server --port 6379", "its default, as above"),
    StandIn(r"/mnt/[\w/]*\w", "{folder}/disk", "another machine's disk"),
    StandIn(r"/(run|etc)/kvstore", r"{folder}/\1", "a folder of the system"),
    StandIn(r"//cache:", "//127.0.0.1:", "another host"),
    StandIn(r"(max_local_(?:cpu|disk)_size\"?: ?)\d{2,}\.0\b", r"\g<1>1.0", "a small machine"),
    StandIn(r"(kvstore flags.* --memory) \d+", r"\1 1", "a small machine"),
    StandIn(r"(kvstore flags.* --disk-size) \d+", r"\1 1", "a small machine"),
)
PORTS: Final = re.compile(r"(?<=[:= ])(6379|7300|80[08]0|8[12]00|9464|5566)\b")
"""Ports that are replaced by free ports of this machine."""

LEFT_OUT: Final = (
    (r"^pip install ", "an installation; the environment of this checkout has it"),
    (r"^(sudo|systemctl|docker|kubectl|helm) ", "needs a cluster or another user's rights"),
    (r"\b10\.\d+\.\d+\.\d+\b|\bredis\.conf\b", "needs other hosts"),
)
"""Commands that are not run, with reasons."""

OF_PAGES: Final = {
    ("tiers.md", "python"): "a module and its test: tests/conformance/test_example.py runs them",
    ("policies.md", "python"): "a test: tests/conformance/test_example.py runs it",
    ("tiers.md", "yaml"): "needs that module: tests/packaging/test_transcripts.py installs it",
}
"""Blocks that tests run in another way, by page and kind."""

_ASSIGNMENT: Final = re.compile(r"[A-Z_]+=")
_NEEDS_VLLM: Final = re.compile(
    r"\bvllm (serve|bench)\b|\bkvstore (warm|prefetch|demo|bench|probe|prove)\b|\bmake (demo|bench)"
    r"|[:= ]8\d\d0\b|:6999\b|from kvstore\.tools\.warm import warm\b"
)
SHELL_WORDS: Final = frozenset({"time", "export", "cd"})
SERVERS: Final = {
    "vllm serve": "Application startup complete",
    "kvstore serve": "ready",
    "kvstore proxy": "status: ready",
    "redis-server": "Ready to accept connections",
}
"""Commands that run until they are stopped, and the words that they print when they are ready."""


def substitute(text: str, places: Mapping[str, str], port_of: Callable[[str], int]) -> str:
    """Return the text as it is run here.

    Args:
        text: text of the page.
        places: paths for ``model`` and ``folder``.
        port_of: returns this machine's port for one that a page names.
    """
    for item in STAND_INS:
        replacement = item.replacement
        for name, place in places.items():
            replacement = replacement.replace(f"{{{name}}}", place)
        text = re.sub(item.pattern, replacement, text)
    return PORTS.sub(lambda match: str(port_of(match[1])), text)


def needs_vllm(text: str) -> bool:
    """Tell if a block or command starts or queries vLLM."""
    return _NEEDS_VLLM.search(text) is not None


def reason_of(block: Block) -> str:
    """Return the reason why a block is not run; empty if it is, or if its commands are checked one by one."""
    if not block.reason and block.kind not in {*COMMANDS, "python", "yaml"}:
        return "shown, not run"
    return block.reason or OF_PAGES.get((block.page, block.kind), "")


def reason_of_command(text: str) -> str:
    """Return the reason why a command is not run; empty if it is run."""
    return next((why for pattern, why in LEFT_OUT if re.search(pattern, text)), "")


def program_of(words: list[str]) -> str:
    """Return the program that a command starts."""
    return next((word for word in words if not _ASSIGNMENT.match(word)), "true")


def server_of(words: list[str]) -> str | None:
    """Return the name in ``SERVERS`` that a command starts; None if it ends by itself."""
    words = [word for word in words if not _ASSIGNMENT.match(word)]
    if "--check" in words:
        return None
    return next((name for name in SERVERS if words[: len(name.split())] == name.split()), None)
