"""Boundary to vLLM's types: outside this package, only the connector, telemetry and offline import vLLM."""
