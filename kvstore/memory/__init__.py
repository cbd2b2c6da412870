"""Host memory: pools of slots, pinning, limits."""
