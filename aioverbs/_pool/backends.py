"""How the workers of a pool are made: threads or processes."""

import errno
import functools
import secrets
import socket
from collections.abc import Callable
from typing import Any

from aioverbs._lifecycle.affinity import Affinity, running_loop
from aioverbs._lifecycle.resource import open_part_now
from aioverbs._pool.process_main import ProcessSettings
from aioverbs._pool.process_worker import ProcessWorker, SocketCall, pickled_call
from aioverbs._pool.supervisor import Counts, Supervisor, WorkerHandle
from aioverbs._pool.thread_worker import ThreadWorker
from aioverbs._pool.worker import WorkerSettings
from aioverbs._verbs.device import Device
from aioverbs._verbs.protection_domain import ProtectionDomain, SharedProtectionDomain, can_send_to_processes
from aioverbs.errors import VerbsError

__all__ = ["ProcessBackend", "SocketCallFactory", "ThreadBackend"]

SocketCallFactory = Callable[[socket.socket, Callable[[bool], object]], object]
"""Makes a call, as workers take it, of a socket, and of what is told on the way: see `SocketCall`."""


class ThreadBackend:
    """How workers are made that are threads. It knows nothing of the pool, or that could not be forgotten."""

    def __init__(self, device: Device, pd: ProtectionDomain, settings: WorkerSettings) -> None:
        self._device = device
        self._pd = pd
        self._settings = settings

    def owner(self) -> Affinity | None:
        """Any loop may close the pool."""
        return None

    def open(self) -> None:
        """Nothing is to be done before."""
        running_loop()

    def spawn(self, supervisor: Supervisor, number: int, counts: Counts) -> WorkerHandle:
        """A worker."""
        return ThreadWorker(supervisor, number, counts, self._device, self._pd, self._settings)

    def make_payload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> object:
        """A call as workers take it."""
        return function, args

    def socket_call_factory(self, function: Callable[..., Any], args: tuple[Any, ...]) -> SocketCallFactory:
        """What makes calls of a function that get a socket first."""
        return lambda sock, report: (function, (sock, report, *args))


class ProcessBackend(ThreadBackend):
    """How workers are made that are processes."""

    _owner: Affinity
    _process_settings: ProcessSettings

    def __init__(self, device: Device, pd: ProtectionDomain, settings: WorkerSettings) -> None:
        super().__init__(device, pd, settings)
        self._shared: SharedProtectionDomain | None = None

    def owner(self) -> Affinity | None:
        """The loop that speaks with them."""
        return Affinity.of_running_loop()

    def open(self) -> None:
        """Share the protection domain, where its device can do that between processes."""
        self._owner = Affinity.of_running_loop()
        key = secrets.randbits(64)
        shared = self._pd.share(key)
        try:
            open_part_now(shared)
        except VerbsError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        else:
            # What is shared inside of one process only has nothing to be sent.
            self._shared = shared if can_send_to_processes(shared) else None
        self._process_settings = ProcessSettings.of(
            self._device, self._settings, (shared.id, key) if self._shared else None
        )

    def spawn(self, supervisor: Supervisor, number: int, counts: Counts) -> WorkerHandle:
        """A worker."""
        return ProcessWorker(supervisor, number, counts, self._owner, self._process_settings, self._shared)

    def make_payload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> object:
        """A call as workers take it."""
        return pickled_call(function, args)

    def socket_call_factory(self, function: Callable[..., Any], args: tuple[Any, ...]) -> SocketCallFactory:
        """What makes calls of a function that get a socket first."""
        return functools.partial(SocketCall, pickled_call(function, args))
