"""What a GPU shows: the speed of every path beside the limit of the same run, and whether every byte arrives.

    python -m kvstore.tools.bench.gpu bench            speed (``make bench-gpu``)
    python -m kvstore.tools.bench.gpu visit            a whole visit to a machine with a GPU, within 25 minutes
    python -m kvstore.tools.bench.gpu one moves-llama-8b    one step in this process, its figures on standard output

Every step is a process with a time limit of its own, whose figures are written to a file as soon as they are known: a
step that fails or hangs costs only its own. With ``--device cpu --small`` everything runs where there is no GPU, for
tests of the bench itself. Start reading in ``steps.py``, which lists them.
"""
