"""Whether a running vLLM finds again what the store keeps."""
