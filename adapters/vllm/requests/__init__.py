"""What a request asks for, and what the scheduler side remembers of it."""
