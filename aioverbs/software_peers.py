"""PURE: statistics of the software device about its peers in other processes and on other hosts."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from aioverbs._exports import publish

__all__ = ["FabricStatistics", "Peer", "RejectedPeer"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Stream between the software device and the software device of another process. Returned by `Device.peers`.

    Each device sends requests over a stream that it connected, and responses over the stream that the peer connected.
    So there are two streams between two devices that both send requests.

    :param gids: GIDs of the peer, 16 bytes each, as in `Endpoint.gid`; before the handshake only the GID to connect to.
    :param connected_by_us: True if this device connected the stream, which carries its requests; False if the peer did.
    :param connected: True if the stream is connected now. A lost stream is connected again when there is data to send.
    :param transport: ``"unix"`` for a socket on this host, or ``"tcp"``; None before the first connection.
    :param direct: True if one of the two processes copies data from memory to memory, bypassing the socket.
    :param why_not_direct: reason why data is not copied directly; empty if it is, or before this is known.
    :param rings: True if requests and responses go through shared memory now, and the socket only wakes the processes.
    :param why_not_rings: reason why they go through the socket; empty if they do not, or before this is known.
    :param problem: reason why the last connection ended or failed; empty if none has yet.
    :param process_id: process ID of the peer; None if the peer is on another host.
    :param user_id: user ID of the peer's process; None if the peer is on another host.
    :param frames_in: number of frames received, over all connections of the stream.
    :param frames_out: number of frames sent, over all connections of the stream.
    :param bytes_in: number of bytes received, over all connections of the stream.
    :param bytes_out: number of bytes sent, over all connections of the stream.
    :param connections: number of times that the stream was connected.
    :param waiting_queue_pairs: number of local queue pairs that wait for buffer space or for the connection.
    """

    gids: tuple[bytes, ...]
    connected_by_us: bool
    connected: bool
    transport: Literal["unix", "tcp"] | None
    direct: bool
    why_not_direct: str
    rings: bool
    why_not_rings: str
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
    """Peer that the software device rejected, or whose stream it closed because of an invalid frame.

    Returned by `Device.refusals`.

    :param time: time of the rejection, in UTC.
    :param gid: first GID of the peer, 16 bytes; None if the peer sent none.
    :param reason: reason of the rejection.
    """

    time: datetime
    gid: bytes | None
    reason: str


@dataclass(frozen=True, slots=True)
class FabricStatistics:
    """Counts of the connections of a software device, over all its contexts in this process.

    Counts are totals since the start of the process.

    :param listening: True if peers can connect to the device.
    :param path: path of its Unix socket; empty if there is none.
    :param address: network address at which it listens, such as ``"10.0.0.1:7470"``; empty if there is none.
    :param problem: reason why peers cannot connect; empty if they can.
    :param accepted: number of streams that peers connected and the device accepted.
    :param connected: number of streams that the device connected.
    :param failed_connections: number of attempts to connect that failed.
    :param lost: number of streams that ended because the connection failed or the peer ended.
    :param refused_peers: number of peers rejected before any request, because they are not permitted, do not have the
        secret or use another protocol.
    :param refused_frames: number of streams closed because of an invalid frame.
    :param refusals: most recent rejections of both kinds, oldest first.
    :param peers: current streams.
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
