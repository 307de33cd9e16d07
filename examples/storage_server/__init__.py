"""A storage server: volumes in files, which clients read and write by RDMA.

    python examples/storage_server serve /srv/volumes --port 7480 --metrics-port 9480
    export STORAGE_AT=127.0.0.1:7480 STORAGE_TOKEN_FILE=/srv/volumes/owner.token
    python examples/storage_server client create disk 1G
    python examples/storage_server client put image disk --verify
    python examples/storage_server client snapshot disk yesterday
    python examples/storage_server load disk --reads 70 --flush-every 100
    python examples/storage_server access /srv/volumes add ann > ann.token
    python examples/storage_server access /srv/volumes allow ann disk read

To see all of it at work in a temporary folder, run

    python examples/storage_server demo

Data moves by one-sided RDMA: a client reads and writes a volume's memory directly, and no code of the server runs. A
write is durable once a flush that began after the write has been answered, even if the server crashes. After a crash,
each byte of an unflushed write has either its old or its new value. A volume whose creation, resize or deletion was
interrupted by a crash is found either unchanged or completely changed.

Every operation needs a token. The client "owner", whose token is in the server's folder, may do everything, and so may
every user that can read the folder. The command ``access`` grants rights to other clients. A client that loses a right
loses it within a second or two, even for a volume that it has open.

Where to start: server.py shows how the parts fit together, client.py is the API for programs, commits.py and
backings.py explain why a flush is durable, catalog.py and volume_store.py explain how interrupted changes are completed
or undone. The package needs click, msgspec, prometheus-client and rich.

Limits: one server serves a volume. If the disk fails under a mapping, a signal ends the server, as for any process
whose mapped file cannot be read. A full disk does not: all blocks of a volume are allocated when it is created. The
exception is a snapshot by reflink, which shares its blocks until one of the two files is written to.
"""
