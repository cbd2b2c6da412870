"""The vLLM V1 adapter.

``connector.py`` is the class vLLM loads: a thin shell. Behind it, ``scheduler.py`` owns the index and makes plans,
``worker.py`` owns the memory and carries them out, ``tracker.py`` remembers requests between steps, ``params.py`` reads
what clients ask for one request, and ``steps.py`` is what travels between the two sides. ``translate.py`` is the only
place that knows vLLM's own objects.
"""
