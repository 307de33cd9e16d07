"""Fake of librdmacm. Its handles check their caller as the compiled ones do."""

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from aioverbs._core.handles import rdma_cm as core
from aioverbs._lifecycle.affinity import Affinity
from aioverbs.rdma_cm.events import CmEventType
from aioverbs.rdma_cm.listener import Listener

__all__ = ["StubChannel", "StubIdentifier", "connection_manager", "request"]

ADDRESS = ("10.77.0.1", 7174)


class _StubHandle:
    def __init__(self, affinity: Affinity) -> None:
        self.affinity = affinity
        self.verbs: list[str] = []  # names of the called verbs

    def _use(self, verb: str) -> None:
        self.affinity.check(self, verb)
        self.verbs.append(verb)


class StubChannel(_StubHandle):
    """Event channel whose events come from the test."""

    def __init__(self, affinity: Affinity) -> None:
        super().__init__(affinity)
        self.fd, self._writer = os.pipe()
        self._events: deque[SimpleNamespace] = deque()

    def put(
        self, event_type: CmEventType, identifier: "StubIdentifier", listener: "StubIdentifier | None" = None
    ) -> None:
        """Add an event to the channel."""
        event = SimpleNamespace(event_type=event_type, status=0, private_data=b"")
        event.identifier, event.listener = identifier, listener
        self._events.append(event)
        os.write(self._writer, b"!")

    def take_event(self) -> SimpleNamespace | None:
        self.affinity.check(self, "rdma_get_cm_event")
        if not self._events:
            return None
        os.read(self.fd, 1)
        return self._events.popleft()

    def destroy(self) -> None:
        self._use("rdma_destroy_event_channel")
        os.close(self.fd)
        os.close(self._writer)


class StubIdentifier(_StubHandle):
    """Identifier that gets the DISCONNECTED event as soon as it disconnects."""

    device_name = "soft0"
    port_num = 1
    local_address = peer_address = ADDRESS

    def __init__(self, channel: StubChannel) -> None:
        super().__init__(channel.affinity)
        self.channel = channel
        self._use("rdma_create_id")

    def bind_addr(self, address: object) -> None:
        self._use("rdma_bind_addr")

    def listen(self, backlog: int) -> None:
        self._use("rdma_listen")

    def reject(self, private_data: bytes) -> None:
        self._use("rdma_reject")

    def disconnect(self) -> None:
        self._use("rdma_disconnect")
        self.channel.put(CmEventType.DISCONNECTED, self)

    def destroy(self) -> None:
        self._use("rdma_destroy_id")


def request(listener: Listener) -> None:
    """Make a peer request a connection from a listener."""
    handle: object = listener.handle
    assert isinstance(handle, StubIdentifier)
    handle.channel.put(CmEventType.CONNECT_REQUEST, StubIdentifier(handle.channel), handle)


@contextlib.contextmanager
def connection_manager() -> Iterator[None]:
    """Replace the handles of channels, identifiers and listeners."""
    with mock.patch.object(core, "EventChannel", StubChannel), mock.patch.object(core, "Identifier", StubIdentifier):
        yield
