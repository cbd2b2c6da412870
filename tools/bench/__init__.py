"""``kvstore bench``: how near the library comes to the limit of this machine, measured in the same run.

Figures in GB/s differ from machine to machine and from minute to minute; fractions of a limit measured right beside
them carry over. So every sample is a pair, path and limit one after the other, in alternating order, and a line's
fraction is the median over its pairs. Data is fresh, blocks are shuffled, and every byte is compared outside the timed
part. ``docs/benchmarks.md`` says how to read the lines; ``run.py`` is where to begin reading the code.
"""
