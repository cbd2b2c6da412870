"""Hand-over: KV sent to another engine while it is computed."""
