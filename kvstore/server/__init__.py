"""The cache server: one pool of memory and a disk, shared by all engines of a host and by other hosts.

State, without I/O:
    stock.py        the places of chunks, and evictions, as ``ChunkIndex`` does for an engine
    spaces.py       one namespace and its chunks
    pins.py         chunks that are kept from eviction
    pool.py         the memory: pages in a memfd, and a list of the free ones
    quotas.py       limits on what namespaces of one name hold together
    sessions.py     clients, and their leases of pages
    shares.py       limits on what one key or socket takes

Requests:
    core.py         state shared by the parts below
    service.py      handlers of requests
    grants.py       grants of pages to write to or read from
    payload.py      payload in messages
    orders.py       operators' orders
    owner.py        the engine that owns an embedded server

Disk:
    disk.py         writes, reads and deletions, on separate threads
    disk_tiers.py   one disk tier for each namespace, of which few are open
    turns.py        the order of work on a file

Sockets:
    hub.py          ZeroMQ's sockets, and the one thread that decides
    intake.py       messages, frame by frame
    watch.py        cuts off connections that send endless messages
    unix_socket.py  hands out the pool, and detects the end of its clients
    client_keys.py  admits clients with a listed public key
    clients.py      senders of messages, and their rights
    files.py        limits of open files and clients
    door.py         closes the network's socket while files are scarce

    options.py      configuration
    embedded.py     a server on a thread of an engine's worker
    reports.py      counters, as JSON and for Prometheus

One thread decides everything and holds no lock; other threads do disk I/O, checksums and copies.
"""
