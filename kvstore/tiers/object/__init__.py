"""Object stores and shared folders: one object a chunk, and a log of manifests by which engines know what is there."""
