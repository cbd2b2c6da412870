"""GPU bench: the speed of every path next to the limit of the same run, and checks that every byte arrives.

    python -m kvstore.tools.bench.gpu bench            speed (``make bench-gpu``)
    python -m kvstore.tools.bench.gpu visit            all steps on a machine with a GPU, within 25 minutes
    python -m kvstore.tools.bench.gpu one moves-llama-8b    one step in this process, its figures on standard output

Every step is a process with a separate time limit, whose figures are written to a file as soon as they are known, so a
step that fails or hangs loses only its own figures. With ``--device cpu --small`` everything runs without a GPU, for
tests of the bench itself. ``steps.py`` lists the steps.
"""
