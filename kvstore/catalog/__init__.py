"""The catalog decides: where every chunk is, what a call may load or store, and what gives way. Pure state, no I/O."""
