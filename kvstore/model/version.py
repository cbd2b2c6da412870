"""Version of this package, as ``kvstore.__version__`` and in pyproject.toml."""

__version__ = "0.1.0"
