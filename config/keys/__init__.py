"""The keys of a configuration, one class per concern: types, limits, defaults, meaning, and what follows from them."""
