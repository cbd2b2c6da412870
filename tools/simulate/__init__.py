"""``kvstore simulate``: what each policy would have found in a trace."""
