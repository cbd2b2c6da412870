"""What a model with several kinds of state needs, besides its chunks, to go on at some token."""
