"""Version of this package, as ``kvstore.__version__``: the only place of it, which pyproject.toml reads."""

__version__ = "0.1.0"
