"""vLLM driven by our own tools: warming and measuring."""
