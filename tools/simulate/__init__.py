"""``kvstore simulate``: the hit rate of each policy over a trace."""
