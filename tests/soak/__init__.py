"""Soak at full size: parts that take hours, can be interrupted at any moment, and go on where they were."""
