"""Metrics and events of the adapter, for operators and routers."""
