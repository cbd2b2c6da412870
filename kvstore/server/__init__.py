"""The cache server: one pool of memory, and a disk, for every engine on a host, and for other hosts.

State, without I/O:
    stock.py        which chunks are where, and which are evicted, as ``ChunkIndex`` is for an engine
    spaces.py       one namespace and its chunks
    pins.py         chunks that are kept from eviction
    pool.py         the memory: pages in a memfd, and which are free
    quotas.py       what namespaces of one name may hold together
    sessions.py     clients, and their leases of pages
    shares.py       how much one key or socket may take

Requests:
    core.py         what the parts below share
    service.py      what each request does
    grants.py       which pages a client may write to or read from
    payload.py      payload in messages
    orders.py       what operators ask for
    owner.py        the engine that owns an embedded server

Disk:
    disk.py         writes, reads and deletions, on threads of their own
    disk_tiers.py   one disk tier for each namespace, of which few are open
    turns.py        the order of work on a file

Sockets:
    hub.py          ZeroMQ's sockets, and the one thread that decides
    intake.py       messages, frame by frame
    watch.py        connections that send without end
    unix_socket.py  hands out the pool, and tells when a client is gone
    client_keys.py  whose public key is listed
    clients.py      who sent a message, and what it may do
    files.py        how many clients can connect
    door.py         the network's entrance

    options.py      configuration
    embedded.py     a server on a thread of an engine's worker
    reports.py      counters, as JSON and for Prometheus

One thread decides everything and holds no lock; other threads do disk I/O, checksums and copies.
"""
