"""The cache server: one pool of memory, and a disk, for every engine on a host, and for other hosts.

    pool.py       the memory: pages in a memfd, and who has which
    stock.py      what is where, and what goes: pure state, as ``ChunkIndex`` is for an engine
    spaces.py     one namespace, and its chunks
    sessions.py   clients, and the places in the pool that are theirs for a while
    freight.py    payload in messages
    shelves.py    the disk, one folder a namespace
    service.py    what a request does
    doors.py      the unix socket through which the pool is handed out, and who has come in
    locks.py      CURVE: keys, and who is on the list
    hub.py        sockets, and the one thread that decides
    reports.py    what is counted, as numbers and for Prometheus
    options.py    how a server is configured

One thread decides everything and holds no lock; disk, checksums and copies are the business of others.
"""
