"""Clients of the cache server: the server tier, and the operator's connection."""
