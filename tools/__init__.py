"""The ``kvstore`` command and what it runs. Nothing in the library imports this package."""
