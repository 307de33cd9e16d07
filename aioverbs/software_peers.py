"""PURE: what the software device tells of its peers in other processes and on other hosts."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from aioverbs._exports import publish

__all__ = ["FabricStatistics", "Peer", "RejectedPeer"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A stream between the software device and one of another process.

    Each side sends its requests over a stream that it connected, and answers over the one that the other connected: two
    devices with requests in both directions have two.

    :param gids: the peer's GIDs, 16 bytes each, as in `Endpoint.gid`; before it told them, the one that is looked for.
    :param connected_by_us: whether it carries our requests; else it carries the peer's.
    :param connected: whether there is a connection now. One of ours is connected again when there is something to send.
    :param transport: ``"unix"`` for a socket of this host, ``"tcp"``; None where it never was connected.
    :param direct: whether data goes from memory to memory, by one of both processes, and not through the socket.
    :param why_not_direct: why it does not; empty where it does, or is not known yet.
    :param problem: why the last connection ended, or none was to be had; empty where there was none yet that did.
    :param process_id: the peer's, where it is on this host.
    :param user_id: likewise.
    :param frames_in: how many frames came, in all connections; so are the next three.
    :param connections: how often it was connected.
    :param waiting_queue_pairs: how many of ours wait for room in it or for the connection.
    """

    gids: tuple[bytes, ...]
    connected_by_us: bool
    connected: bool
    transport: Literal["unix", "tcp"] | None
    direct: bool
    why_not_direct: str
    problem: str
    process_id: int | None
    user_id: int | None
    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    connections: int
    waiting_queue_pairs: int


@dataclass(frozen=True, slots=True)
class RejectedPeer:
    """A peer that the software device turned away, or whose stream it closed for what came over it.

    :param time: when, in UTC.
    :param gid: the peer's first GID, 16 bytes; None where it had told none.
    :param reason: why.
    """

    time: datetime
    gid: bytes | None
    reason: str


@dataclass(frozen=True, slots=True)
class FabricStatistics:
    """What a software device has to do with others, in all contexts of it that this process has.

    :param listening: whether others find it.
    :param path: of its Unix socket, empty where it has none.
    :param address: where it listens on the network, as ``"10.0.0.1:7470"``; empty where it does not.
    :param problem: why it is not found; empty where nothing is wrong.
    :param accepted: how many streams others connected and were let in, ever in this process; so are the next ones.
    :param connected: how many it connected itself.
    :param failed_connections: how often none was to be had.
    :param lost: how many streams ended by what happened to the connection or the peer.
    :param refused_peers: how many were turned away before any request: who are not allowed, do not know the secret, or
        speak something else.
    :param refused_frames: how many streams were closed for what came over them.
    :param refusals: the last of both, oldest first.
    :param peers: the streams that there are.
    """

    listening: bool
    path: str
    address: str
    problem: str
    accepted: int
    connected: int
    failed_connections: int
    lost: int
    refused_peers: int
    refused_frames: int
    refusals: tuple[RejectedPeer, ...]
    peers: tuple[Peer, ...]


publish(__name__)
