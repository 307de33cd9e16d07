"""Identifiers that connect again after a rejection, with a fake of librdmacm."""

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


class FakeLibrary:
    """Fake of librdmacm: identifiers that can request once each, and peers with prepared answers."""

    def __init__(self, qp: QueuePair) -> None:
        self.qp = qp
        self.answers: deque[CmEventType] = deque()
        self.identifiers: list[FakeIdentifier] = []
        self.error: VerbsError | None = None

    def make(self, channel: Any) -> "FakeIdentifier":
        if self.error is not None:
            raise self.error
        self.identifiers.append(FakeIdentifier(self, channel._dispatcher))
        return self.identifiers[-1]


class FakeIdentifier:
    """An identifier that connects to its own queue pair."""

    port_num = 1
    local_address = None

    def __init__(self, library: FakeLibrary, dispatcher: Dispatcher) -> None:
        self._library = library
        self._dispatcher = dispatcher
        self.device_name = library.qp.handle.context.name
        self.peer_address: object = None
        self.connect_calls = self.destroyed = 0

    def _post_event(self, kind: CmEventType) -> None:
        event = SimpleNamespace(event_type=int(kind), status=8, private_data=b"", identifier=self, listener=None)
        receiver = self._dispatcher.receivers[cast(core.Identifier, self)]
        self._dispatcher.loop.call_soon(receiver.on_event, cast(core.Event, event))

    def resolve_addr(self, address: object, timeout_ms: int, source: object) -> None:
        self.peer_address = address
        self._post_event(CmEventType.ADDR_RESOLVED)

    def resolve_route(self, timeout_ms: int) -> None:
        self._post_event(CmEventType.ROUTE_RESOLVED)

    def connect(self, **_: object) -> None:
        self.connect_calls += 1
        self._post_event(self._library.answers.popleft())

    def establish(self) -> None:
        pass

    def init_qp_attr(self, state: QpState) -> QpAttrs:
        qp, here = self._library.qp, self._library.qp.local_endpoint()
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
        self._post_event(CmEventType.DISCONNECTED)

    def destroy(self) -> None:
        self.destroyed += 1


class Channel(EventChannel):
    """A channel of the fake."""

    def _open(self) -> None:
        dispatcher = SimpleNamespace(loop=asyncio.get_running_loop(), receivers={})
        self._dispatcher = cast(Dispatcher, dispatcher)
        self._handle = cast(core.EventChannel, self)


@pytest.mark.parametrize("resolves", [False, True])
async def test_a_rejected_identifier_can_connect_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, resolves: bool
) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        Channel() as channel,
    ):
        library = FakeLibrary(qp)
        monkeypatch.setattr(core, "Identifier", library.make)
        monkeypatch.setattr(cm_id, "check_queue_pair", lambda qp, attributes: None)  # which is of soft0
        library.answers.extend([REJECTED, REJECTED, RESPONSE])
        async with Identifier(channel) as identifier:
            await identifier.resolve(*PEER)
            for _ in (1, 2):
                with pytest.raises(ConnectionRejectedError):
                    await identifier.connect(qp)
                assert qp.query().qp_state is QpState.INIT
                assert identifier.peer_address == PEER
                with pytest.raises(QueuePairStateError, match="is not connected"):
                    await identifier.disconnect()
            if resolves:
                await identifier.resolve(*OTHER)
            await identifier.connect(qp)
            assert identifier.connected
            assert identifier.peer_address == (OTHER if resolves else PEER)
            assert qp.query().qp_state is QpState.RTS
            assert [each.connect_calls for each in library.identifiers] == [1, 1, 1]
            assert [each.destroyed for each in library.identifiers] == [1, 1, 0]
            assert len(channel._dispatcher.receivers) == 1
        assert [each.destroyed for each in library.identifiers] == [1, 1, 1]
        assert not channel._dispatcher.receivers


async def test_a_failed_restart_can_be_retried(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
        Channel() as channel,
    ):
        library = FakeLibrary(qp)
        monkeypatch.setattr(core, "Identifier", library.make)
        monkeypatch.setattr(cm_id, "check_queue_pair", lambda qp, attributes: None)
        library.answers.extend([REJECTED, RESPONSE])
        async with Identifier(channel) as identifier:
            await identifier.resolve(*PEER)
            with pytest.raises(ConnectionRejectedError):
                await identifier.connect(qp)
            library.error = VerbsError("rdma_create_id", errno.ENOMEM)
            for ask in (lambda: identifier.connect(qp), lambda: identifier.resolve(*OTHER)):
                with pytest.raises(VerbsError, match="rdma_create_id failed: ENOMEM"):
                    await ask()
                assert not library.identifiers[0].destroyed
            library.error = None
            await identifier.connect(qp)
            assert identifier.peer_address == PEER
