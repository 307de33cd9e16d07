"""Identifiers that a peer rejected and that ask again, with a stand-in for librdmacm."""

import asyncio
import errno
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioverbs import ConnectionRejectedError, Device, QpState, QueuePair, QueuePairStateError, VerbsError
from aioverbs._core.handles import rdma_cm as core
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs.rdma_cm import cm_id
from aioverbs.rdma_cm.cm_id import Identifier
from aioverbs.rdma_cm.events import CmEventType, Dispatcher, EventChannel

PEER, OTHER = ("10.77.0.2", 7174), ("10.77.0.3", 7174)
RESPONSE, REJECTED = CmEventType.CONNECT_RESPONSE, CmEventType.REJECTED


class Manager:
    """What librdmacm has: identifiers, which ask once each, and peers, which answer as they are told."""

    def __init__(self, qp: QueuePair) -> None:
        self.qp = qp
        self.answers: deque[CmEventType] = deque()
        self.made: list[Kernel] = []
        self.fails: VerbsError | None = None

    def make(self, channel: Any) -> "Kernel":
        if self.fails is not None:
            raise self.fails
        self.made.append(Kernel(self, channel._dispatcher))
        return self.made[-1]


class Kernel:
    """An identifier of librdmacm's, that leads to the queue pair itself."""

    port_num = 1
    local_address = None

    def __init__(self, manager: Manager, dispatcher: Dispatcher) -> None:
        self._manager = manager
        self._dispatcher = dispatcher
        self.device_name = manager.qp.handle.context.name
        self.peer_address: object = None
        self.asked = self.destroyed = 0

    def _tell(self, kind: CmEventType) -> None:
        told = SimpleNamespace(event_type=int(kind), status=8, private_data=b"", identifier=self, listener=None)
        receiver = self._dispatcher.receivers[cast(core.Identifier, self)]
        self._dispatcher.loop.call_soon(receiver.on_event, cast(core.Event, told))

    def resolve_addr(self, address: object, timeout_ms: int, source: object) -> None:
        self.peer_address = address
        self._tell(CmEventType.ADDR_RESOLVED)

    def resolve_route(self, timeout_ms: int) -> None:
        self._tell(CmEventType.ROUTE_RESOLVED)

    def connect(self, **_: object) -> None:
        self.asked += 1
        self._tell(self._manager.answers.popleft())

    def establish(self) -> None:
        pass

    def init_qp_attr(self, state: QpState) -> QpAttrs:
        qp, here = self._manager.qp, self._manager.qp.local_endpoint()
        if state is QpState.INIT:
            return QpAttrs(pkey_index=0, port_num=1)
        if state is QpState.RTS:
            return QpAttrs(sq_psn=here.psn, max_rd_atomic=1, timeout=14, retry_cnt=6, rnr_retry=6)
        return QpAttrs(
            av=qp.path_to(here),
            path_mtu=here.mtu,
            dest_qp_num=here.qp_num,
            rq_psn=here.psn,
            max_dest_rd_atomic=1,
            min_rnr_timer=1,
        )

    def disconnect(self) -> None:
        self._tell(CmEventType.DISCONNECTED)

    def destroy(self) -> None:
        self.destroyed += 1


class Channel(EventChannel):
    """A channel of that manager's."""

    def _open(self) -> None:
        dispatcher = SimpleNamespace(loop=asyncio.get_running_loop(), receivers={})
        self._dispatcher = cast(Dispatcher, dispatcher)
        self._handle = cast(core.EventChannel, self)


@pytest.mark.parametrize("resolves", [False, True])
async def test_a_rejected_one_connects_when_it_asks_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, resolves: bool
) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        Channel() as channel,
    ):
        manager = Manager(qp)
        monkeypatch.setattr(core, "Identifier", manager.make)
        monkeypatch.setattr(cm_id, "check_queue_pair", lambda qp, attributes: None)  # which is of soft0
        manager.answers.extend([REJECTED, REJECTED, RESPONSE])
        async with Identifier(channel) as asking:
            await asking.resolve(*PEER)
            for _ in (1, 2):
                with pytest.raises(ConnectionRejectedError):
                    await asking.connect(qp)
                assert qp.query().qp_state is QpState.INIT
                assert asking.peer_address == PEER
                with pytest.raises(QueuePairStateError, match="is not connected"):
                    await asking.disconnect()
            if resolves:
                await asking.resolve(*OTHER)
            await asking.connect(qp)
            assert asking.connected
            assert asking.peer_address == (OTHER if resolves else PEER)
            assert qp.query().qp_state is QpState.RTS
            assert [each.asked for each in manager.made] == [1, 1, 1]
            assert [each.destroyed for each in manager.made] == [1, 1, 0]
            assert len(channel._dispatcher.receivers) == 1
        assert [each.destroyed for each in manager.made] == [1, 1, 1]
        assert not channel._dispatcher.receivers


async def test_there_is_no_other_identifier(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be tried again when there is."""
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        Channel() as channel,
    ):
        manager = Manager(qp)
        monkeypatch.setattr(core, "Identifier", manager.make)
        monkeypatch.setattr(cm_id, "check_queue_pair", lambda qp, attributes: None)
        manager.answers.extend([REJECTED, RESPONSE])
        async with Identifier(channel) as asking:
            await asking.resolve(*PEER)
            with pytest.raises(ConnectionRejectedError):
                await asking.connect(qp)
            manager.fails = VerbsError("rdma_create_id", errno.ENOMEM)
            for ask in (lambda: asking.connect(qp), lambda: asking.resolve(*OTHER)):
                with pytest.raises(VerbsError, match="rdma_create_id failed: ENOMEM"):
                    await ask()
                assert not manager.made[0].destroyed
            manager.fails = None
            await asking.connect(qp)
            assert asking.peer_address == PEER
