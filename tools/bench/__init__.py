"""``kvstore bench``: how close the library comes to the limit of this machine, measured in the same run.

Figures in GB/s differ between machines and from minute to minute; fractions of a limit that was measured alongside
carry over. So every sample is a pair, path and limit one right after the other, in alternating order, and the fraction
of a line is the median over its pairs. Data is new in every round, blocks are shuffled, and every byte is compared
outside the timed part. ``docs/benchmarks.md`` has limits and figures; start reading the code in ``run.py``.
"""
