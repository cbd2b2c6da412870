"""The scheduler side: lookups, plans and what became of them."""
