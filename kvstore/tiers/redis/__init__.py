"""The Redis tier: one server, Sentinel or a cluster."""
