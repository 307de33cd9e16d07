"""Address handles: paths of datagrams to a port."""

import asyncio
from typing import Self

from aioverbs._core.data_path.data_path import Destination
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.resource import HandleResource, Resource
from aioverbs._memory.region import WaitableInFlightCount
from aioverbs._verbs import neighbour_lookup
from aioverbs._verbs.endpoint import Endpoint
from aioverbs._verbs.ports import check_port, gid_index
from aioverbs.attributes import AddressVector
from aioverbs.types import LinkLayer

__all__ = ["AddressHandle", "Destination"]


class AddressHandle(HandleResource[handles.AddressHandle]):
    """A path to a port: ``ibv_create_ah``. Any event loop may use it. Made by `ProtectionDomain.address_handle`.

    Closing waits for datagrams in flight that use the address handle. If closing is cancelled, the address handle is
    closed once those datagrams have completed.

    :param pd: protection domain of the address handle.
    :param handle: verbs object of the protection domain.
    :param to: endpoint of a UD queue pair, which also gives the default queue pair number and key; or a path.
    :param port: number of the device port to send from; used if `to` is an endpoint.
    :param index: index of the port's GID to send from; used if `to` is an endpoint. None to have one
        chosen as described in `QueuePair`.
    """

    def __init__(
        self, pd: Resource, handle: handles.ProtectionDomain, to: Endpoint | AddressVector, port: int, index: int | None
    ) -> None:
        super().__init__(pd)
        self._lifecycle.close_last = True
        self._pd_handle = handle
        self._to = to
        self._port = port
        self._gid_index = index
        self.pins = WaitableInFlightCount()

    async def open(self) -> Self:
        """Open the address handle: ``ibv_create_ah``.

        On RDMA devices the kernel resolves the address of the next hop, which takes seconds if the next hop does not
        answer. A helper thread therefore calls the verb, as in `QueuePair.establish`, and the event loop is not
        blocked. A cancellation is raised only after the verb has ended; the address handle is then closed. If opening
        fails, the address handle stays unopened.

        :returns: the address handle itself, to be closed by the caller.
        :raises ClosedResourceError: the address handle was opened before, or its protection domain is closed.
        :raises ValueError: the port or the GID index does not exist, the port has no GID, no path leads from the port
            to the endpoint, or the ``dgid`` of the path is not 16 bytes long.
        :raises OverflowError: a number in the path does not fit in its field.
        :raises VerbsError: the verb failed, for example because the next hop did not answer; with EAGAIN, if no helper
            thread can be started.
        :raises RuntimeError: on an RDMA device: no asyncio event loop is running.
        """
        if not neighbour_lookup.may_block(self._pd_handle.context):
            return await super().open()
        is_opened_here = False

        def open_here() -> None:
            nonlocal is_opened_here
            self._open_now()
            is_opened_here = True

        try:
            await neighbour_lookup.run_in_helper_thread("ibv_create_ah", open_here)
        except asyncio.CancelledError:
            if is_opened_here:  # otherwise another task may have opened it
                await self.aclose()
            raise
        return self

    def _open(self) -> None:
        path = self._to
        if isinstance(path, Endpoint):
            context = self._pd_handle.context
            check_port(context, self._port, self._gid_index)
            if self._gid_index is None:
                self._gid_index = gid_index(context, self._port)
            port, gid = context.query_port(self._port), context.query_gid(self._port, self._gid_index)
            here = Endpoint(gid, 0, 0, port.active_mtu, lid=port.lid if port.link_layer is LinkLayer.INFINIBAND else 0)
            path = here.path_to(path, port_num=self._port, sgid_index=self._gid_index)
        self._handle = handles.AddressHandle(self._pd_handle, path)
        self._lifecycle.hold(self._handle)
        self._lifecycle.drain = self.pins.close_and_wait
        self._lifecycle.must_drain = True
        self._lifecycle.resume = self.pins.reopen

    def to(self, qp_num: int | None = None, qkey: int | None = None) -> Destination:
        """Return a `Destination` for datagrams, to be passed to `QueuePair.send` as ``to``.

        :param qp_num: number of the remote queue pair, 0..2**24-1; None for the one in the endpoint that the address
            handle was made from.
        :param qkey: key of the remote queue pair, 0..2**32-1; None for the one in that endpoint.
        :raises ValueError: `qp_num` or `qkey` is out of range, or is None although the address handle was made from a
            path instead of an endpoint.
        :raises ClosedResourceError: the address handle is not open.
        """
        if isinstance(self._to, Endpoint):
            qp_num = self._to.qp_num if qp_num is None else qp_num
            qkey = self._to.qkey if qkey is None else qkey
        if qp_num is None or qkey is None:
            raise ValueError(f"{self!r} was made from a path: give qp_num and qkey of the remote queue pair")
        return Destination(self.handle, self.pins, qp_num, qkey)


publish(__name__)
