"""Which vLLM this was tested with."""

TESTED_VLLM = "0.32."
"""How a version of vLLM begins that may be used."""
