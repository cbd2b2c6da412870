"""The vLLM V1 adapter.

``connector.py`` is the class that vLLM loads, a thin shell. Behind it, ``scheduler/`` owns the index and plans,
``worker/`` owns the memory and carries the plans out, ``requests/`` reads what clients ask for and remembers requests
between steps, and ``plan.py`` is what travels between the two sides. vLLM's own types end in ``glue/``.
"""
