"""Where vLLM's types end: only the connector, telemetry and offline import vLLM besides."""
