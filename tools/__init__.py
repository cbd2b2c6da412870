"""Implementation of the ``kvstore`` command; nothing in the library imports this package."""
