"""Requests: their fields, and the state that the scheduler side keeps of them."""
