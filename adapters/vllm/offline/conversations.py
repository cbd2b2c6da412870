"""One vLLM on this machine's CPU that carries out tasks for the conversations of ``kvstore bench --turns``.

    python -m kvstore.adapters.vllm.offline.conversations MODEL TRANSFER

TRANSFER is a KV transfer configuration as JSON, or null. Each line on standard input is a task, each answer a line of
JSON on standard output after ``MARK``: seconds, and the tokens of each prompt that were not computed.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from vllm import LLM

from kvstore.adapters.vllm.offline.measuring import ask, opened

MARK: Final = "BENCH ANSWER "
_STEP_TOKENS: Final = 8192  # all prompts of a task in one step: vLLM's ExampleConnector fails to load those of two


def answer(llm: LLM, task: dict[str, Any]) -> dict[str, Any]:
    """Carry out one task: ``{"prompts": [[...]], "max_tokens": 1}``, or ``{"forget": true}``.

    The latter empties vLLM's own prefix cache, as other requests or a restart would; a connector keeps its KV.
    """
    if task.get("forget"):
        return {"forgot": bool(llm.reset_prefix_cache())}
    seconds, cached_tokens = ask(llm, task["prompts"], max_tokens=task["max_tokens"])
    return {"seconds": seconds, "cached_tokens": cached_tokens}


def main() -> None:
    """Carry out tasks until standard input ends."""
    model, transfer = sys.argv[1], json.loads(sys.argv[2])
    with opened(model, transfer, max_num_batched_tokens=_STEP_TOKENS) as llm:
        print(MARK + "{}", flush=True)  # noqa: T201 - to the process that started this one
        for line in sys.stdin:
            print(MARK + json.dumps(answer(llm, json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
