"""Probe of a running vLLM, which checks that it finds stored chunks of a repeated prompt."""
