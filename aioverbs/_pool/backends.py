"""Backends of worker pools: threads and processes."""

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
"""Function that makes a call from a socket and a callback that takes a bool: see `SocketCall`."""


class ThreadBackend:
    """Backend whose workers are threads.

    A backend has no reference to the pool. The worker threads reference the backend, so such a reference would keep a
    pool that is no longer used from being garbage-collected.

    :param device: device of the pool.
    :param pd: protection domain of the pool.
    :param settings: settings of all workers.
    """

    def __init__(self, device: Device, pd: ProtectionDomain, settings: WorkerSettings) -> None:
        self._device = device
        self._pd = pd
        self._settings = settings

    def owner(self) -> Affinity | None:
        """Return None: any event loop may close the pool."""
        return None

    def open(self) -> None:
        """Check that an asyncio event loop is running.

        :raises RuntimeError: none is running.
        """
        running_loop()

    def spawn(self, supervisor: Supervisor, number: int, counts: Counts) -> WorkerHandle:
        """Return the handle of a new worker, which is not started."""
        return ThreadWorker(supervisor, number, counts, self._device, self._pd, self._settings)

    def make_payload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> object:
        """Return a call of a function in the form that `Supervisor.send` takes: a tuple of function and arguments."""
        return function, args

    def socket_call_factory(self, function: Callable[..., Any], args: tuple[Any, ...]) -> SocketCallFactory:
        """Return a function that makes calls with a socket and a callback as first arguments.

        :param function: function that takes a socket, a callback that takes a bool, and the arguments.
        :param args: further positional arguments of the function.
        """
        return lambda sock, report: (function, (sock, report, *args))


class ProcessBackend(ThreadBackend):
    """Backend whose workers are processes."""

    _owner: Affinity
    _process_settings: ProcessSettings

    def __init__(self, device: Device, pd: ProtectionDomain, settings: WorkerSettings) -> None:
        super().__init__(device, pd, settings)
        self._shared: SharedProtectionDomain | None = None

    def owner(self) -> Affinity | None:
        """Return the running loop, which communicates with the workers.

        :raises RuntimeError: no asyncio event loop is running.
        """
        return Affinity.of_running_loop()

    def open(self) -> None:
        """Share the protection domain, if the device can share it between processes.

        :raises VerbsError: the domain cannot be shared for another reason than EOPNOTSUPP.
        :raises RuntimeError: no asyncio event loop is running.
        """
        self._owner = Affinity.of_running_loop()
        key = secrets.randbits(64)
        shared = self._pd.share(key)
        try:
            open_part_now(shared)
        except VerbsError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        else:
            # A domain that can be shared only inside of one process cannot be sent.
            self._shared = shared if can_send_to_processes(shared) else None
        self._process_settings = ProcessSettings.of(
            self._device, self._settings, (shared.id, key) if self._shared else None
        )

    def spawn(self, supervisor: Supervisor, number: int, counts: Counts) -> WorkerHandle:
        """Return the handle of a new worker, which is not started."""
        return ProcessWorker(supervisor, number, counts, self._owner, self._process_settings, self._shared)

    def make_payload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> object:
        """Return a call of a function, pickled, in the form that `Supervisor.send` takes.

        :raises pickle.PicklingError: the function or an argument cannot be pickled; `pickle` may raise other exceptions
            instead.
        """
        return pickled_call(function, args)

    def socket_call_factory(self, function: Callable[..., Any], args: tuple[Any, ...]) -> SocketCallFactory:
        """Return a function that makes calls with a socket and a callback as first arguments.

        :param function: function that takes a socket, a callback that takes a bool, and the arguments.
        :param args: further positional arguments of the function.
        :raises pickle.PicklingError: see `make_payload`.
        """
        return functools.partial(SocketCall, pickled_call(function, args))
