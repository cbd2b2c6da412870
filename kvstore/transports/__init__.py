"""Ways to hand chunks over to another engine: ``base.py`` says what each promises, ``tcp.py`` is the one there is."""
