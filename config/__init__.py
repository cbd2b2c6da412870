"""The configuration of kvstore: one frozen model, read from a YAML file, the environment and vLLM's extra config."""

from kvstore.config.loader import LoadedConfig, load_config
from kvstore.config.schema import StoreConfig

__all__ = ["LoadedConfig", "StoreConfig", "load_config"]
