"""Package of ``kvstore bench``, which measures each path against a limit of this machine in the same run.

Figures in GB/s differ between machines and from minute to minute; fractions of a limit measured in the same run are
comparable. So every sample is a pair, path and limit one right after the other, in alternating order, and the
fraction of a line is the median over its pairs. Data is new in every round, blocks are shuffled, and every byte is
compared outside the timed part. ``docs/benchmarks.md`` lists limits and figures. ``run.py`` is the entry point.
"""
