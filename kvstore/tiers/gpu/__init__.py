"""The GPU tier: copies of hot chunks in device memory."""
