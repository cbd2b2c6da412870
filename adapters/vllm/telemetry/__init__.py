"""Numbers and events of the adapter, for people and routers."""
