"""Implementation of ``kvstore why``, which explains from a recorded trace why a request missed."""
