"""The cache server's client: the server tier, and the operator's connection."""
