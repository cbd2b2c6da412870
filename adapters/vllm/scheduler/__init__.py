"""The scheduler side: lookups, plans and their results."""
