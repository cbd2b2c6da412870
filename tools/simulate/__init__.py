"""Implementation of ``kvstore simulate``, which computes the hit rate of each policy over a trace."""
