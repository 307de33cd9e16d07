"""A storage server, in the small and in earnest: volumes in files, that clients read and write by RDMA.

    python examples/storage_server serve /srv/volumes --port 7480 --metrics-port 9480
    export STORAGE_AT=127.0.0.1:7480 STORAGE_TOKEN_FILE=/srv/volumes/owner.token
    python examples/storage_server client create disk 1G
    python examples/storage_server client put image disk --verify
    python examples/storage_server client snapshot disk yesterday
    python examples/storage_server load disk --reads 70 --flush-every 100
    python examples/storage_server access /srv/volumes add ann > ann.token
    python examples/storage_server access /srv/volumes allow ann disk read

or, to see all of it at work in a folder that is gone afterwards,

    python examples/storage_server demo

Data goes one-sidedly: a client reads and writes a volume's memory, and the server's program does nothing for it. What
was written is durable when a flush that began after it is answered, whatever happens to the server; what was not is,
byte for byte, as before or as written. A volume that was made, resized or deleted is found whole after any crash, or as
it was before.

Nobody may do anything without a token. The folder's own, of the client "owner", may do everything: so may whoever can
read the folder. Other clients may do what the command ``access`` says; who loses a right loses it within a second or
two, also where the volume is open.

Where to read on: server.py has how the parts hang together, client.py is what programs use, commits.py and backings.py
have why a flush is durable, folder.py and catalog.py why nothing is half made. It wants msgspec and prometheus-client.

What it does not do: a volume has one server. A disk that fails under a mapping ends the server by a signal, as any
process whose mapped file cannot be read; that a disk is full does not, since volumes have all of their room from the
beginning, but for snapshots by reflink, which share it until either is written to.
"""
