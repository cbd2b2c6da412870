"""Requests: their clients' wishes, and the state that the scheduler side keeps of them."""
