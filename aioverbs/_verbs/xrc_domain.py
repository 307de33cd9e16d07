"""XRC domains, through which one shared receive queue serves the queue pairs of many processes."""

import os

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.resource import HandleResource, Resource
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.errors import BusyResourceError
from aioverbs.types import QpType

__all__ = ["XrcDomain"]


class XrcDomain(HandleResource[handles.XrcDomain]):
    """An XRC domain: ``ibv_open_xrcd``. Any event loop may use it. Made by `Device.xrc_domain`.

    An inode identifies at most one domain, no matter which process opens the inode, or whether it does so by name or
    through an inherited descriptor. The domain is destroyed when the last process closes it or ends. Receives of a
    shared receive queue are processed by the process that made the queue.

    On the software device, this holds among processes with the same AIOVERBS_SOFT_DIRECTORY, and a forked child counts
    as a user only of the domains that it opens itself. If that directory cannot be created or is not trusted, for
    example because other users can write to it while AIOVERBS_SOFT_USERS is empty, a process sees only its own domains.

    :param device: device of the domain.
    :param context: open context of the device.
    :param fd: "the file descriptor to associate with the XRCD": processes that open the same inode open the same
        domain; -1 for a domain without an inode, which no other process can open.
    :param oflag: ``os.O_CREAT``: create the domain if it does not exist; with ``os.O_EXCL``, opening fails if it
        exists. Without ``os.O_CREAT``, opening fails if it does not exist.
    :raises VerbsError: on opening: with EINVAL if the domain exists and ``os.O_EXCL`` was given; with EAGAIN if it does
        not exist and ``os.O_CREAT`` was not given; with EBADF if `fd` is not an open file; with EOPNOTSUPP if the
        provider has no XRC domains; or the verb failed for another reason.
    """

    def __init__(self, device: Resource, context: handles.Context, fd: int = -1, oflag: int = os.O_CREAT) -> None:
        super().__init__(device)
        self._context = context
        self._fd = fd
        self._oflag = oflag

    def _open(self) -> None:
        self._handle = handles.XrcDomain(self._context, self._fd, self._oflag)
        self._lifecycle.hold(self._handle)

    def queue_pair(self, *, port: int = 1, gid_index: int | None = None) -> QueuePair:
        """Return a new XRC_RECV queue pair on this domain, to be opened.

        The queue pair has no queues: each message goes to the shared receive queue whose number the peer specifies.

        :param port: number of the device port to respond from.
        :param gid_index: index of the port's GID to respond from; None to have one chosen as described in `QueuePair`.
        :raises ClosedResourceError: on opening: the domain is not open.
        :raises ValueError: on opening: `port` is not in 0..255. `gid_index` is checked only when it is used.
        :raises VerbsError: on opening: the verb failed, for example because the device has no such port.
        """
        return QueuePair(self, None, None, qp_type=QpType.XRC_RECV, xrc_domain=self, port=port, gid_index=gid_index)

    async def aclose(self) -> None:
        """Close the domain: ``ibv_close_xrcd``.

        In the child of a fork, do nothing, because the parent process owns the domain. If the domain is already closed,
        do nothing.

        :raises BusyResourceError: a queue pair or shared receive queue on this domain is still open, so that the verb
            would fail; nothing was done.
        :raises VerbsError: the verb failed; the domain is still open and can be closed again.
        :raises RuntimeError: another task is opening or closing the domain, and no asyncio event loop is running.
        """
        if self._lifecycle.children and not self._lifecycle.inherited:
            first = next(iter(self._lifecycle.children.values()))
            raise BusyResourceError(f"{self!r} cannot be closed: {first!r} is associated with it; close that first")
        await super().aclose()


publish(__name__)
