"""Checks of ``kvstore doctor`` that this machine and vLLM's flags support a configuration."""
