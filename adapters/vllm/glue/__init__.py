"""Where vLLM's types end: nothing outside this folder and the connector knows their fields."""
