"""The cache server: one pool of memory and a disk, shared by all engines of a host and by other hosts.

State, without I/O:
    stock.py        the places of chunks, and evictions, as ``ChunkIndex`` does for an engine
    spaces.py       namespaces, their chunks and their quotas
    pins.py         chunks that are kept from eviction
    pool.py         the memory: pages in a memfd, and a list of the free ones
    clients.py      the clients' identity and rights, and limits on what one key or socket takes
    sessions.py     sessions of clients, and their leases of pages

Requests:
    core.py         state shared by the parts below, and long work in slices
    service.py      handlers of requests
    grants.py       grants of pages to write to or read from
    payload.py      payload in messages
    offers.py       payload read from clients' memory through a channel
    operators.py    operators' orders and reports
    owner.py        the engine that owns an embedded server, and those that send it chunks

Disk:
    disk.py         writes, reads and deletions, on separate threads
    disk_tiers.py   one disk tier for each namespace, of which few are open
    file_order.py   the order of work on a file

Sockets:
    hub.py          ZeroMQ's sockets, and the one thread that decides
    connections.py  limits on connections and messages
    unix_socket.py  hands out the pool, and detects the end of its clients

    options.py      configuration
    embedded.py     a server on a thread of an engine's worker

One thread decides everything and holds no lock; other threads do disk I/O, checksums and copies.
"""
