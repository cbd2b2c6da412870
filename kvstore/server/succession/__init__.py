"""Succession: a running server hands its memory, its chunks and its clients' leases to another process on this host.

The predecessor listens on a socket in its folder (``giving.py``), and the successor connects to it (``taking.py``).
Their conversation is in ``link.py``, and what is handed over, the estate, in ``estate.py``:

1. The successor says which formats it reads, and how it is configured. The predecessor refuses what cannot work.
2. The predecessor ends its writes to disk while it still serves, then pauses (``pause.py``): it answers no request,
   lets its clients go, and waits until no other thread touches its memory or its files.
3. It sends the estate, and the descriptors of memory, sockets and locks. The successor settles it, and says so.
4. Only after the predecessor has said *yours*, which it never takes back, the successor serves, and it ends.

Before the fourth step any failure leaves the predecessor as it was, and it goes on. A client whose connection is ended
repeats its call over a new one. Pages that a client of this host may still read or write are kept until it has closed
its old connection, which the successor inherits.
"""
