"""XRC domains: what lets one shared receive queue serve the queue pairs of many processes."""

import os

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.resource import HandleResource, Resource
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.errors import BusyResourceError
from aioverbs.types import QpType

__all__ = ["XrcDomain"]


class XrcDomain(HandleResource[handles.XrcDomain]):
    """An XRC domain: ``ibv_open_xrcd``. Any event loop may use it.

    Made by `Device.xrc_domain`.

    An inode has one domain, whichever process opens it, by whatever name or inherited descriptor. It ends when the last
    process closes it; one that ends, or is killed, has closed it. A shared receive queue is served by the process that
    made it. On the software device that holds among the processes that have AIOVERBS_SOFT_DIRECTORY in common, and the
    child of a fork counts by what it opens itself, not by what its parent has. Where that directory cannot be made, or
    is not to be trusted, as where other users can write to it and AIOVERBS_SOFT_USERS names none, a process knows of
    its own domains only.

    :param fd: "the file descriptor to associate with the XRCD": who opens one with the same inode opens the same; -1:
        no inode is associated, and nobody else opens it.
    :param oflag: ``os.O_CREAT``: it is created where it does not exist; with ``os.O_EXCL`` opening fails where it does.
        Without ``os.O_CREAT`` opening fails where it does not exist.
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
        """A queue pair of type XRC_RECV, to be opened. It has nothing but the domain: what arrives goes to the shared
        receive queues that its peers name.

        :param port: the device's port that it answers from.
        :param gid_index: which of the port's GIDs it answers from; None: see `QueuePair`.
        """
        return QueuePair(self, None, None, qp_type=QpType.XRC_RECV, xrc_domain=self, port=port, gid_index=gid_index)

    async def aclose(self) -> None:
        """Close it: ``ibv_close_xrcd``. In the child of a fork nothing is done: it is the parent's.

        :raises BusyResourceError: something is still associated with it, which the verb refuses, too; nothing was done.
        :raises VerbsError: the verb failed; it is still open, and can be closed again.
        """
        if self._lifecycle.children and not self._lifecycle.inherited:
            first = next(iter(self._lifecycle.children.values()))
            raise BusyResourceError(f"{self!r} cannot be closed: {first!r} is associated with it; close that first")
        await super().aclose()


publish(__name__)
