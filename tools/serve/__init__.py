"""Cache server as a process, for ``kvstore serve``."""
