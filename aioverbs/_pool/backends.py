"""Backends of worker pools: threads and processes."""

import errno
import functools
import socket
from collections.abc import Callable
from typing import Any

from aioverbs._lifecycle.affinity import Affinity, running_loop
from aioverbs._pool.process_main import ProcessSettings
from aioverbs._pool.process_worker import ProcessWorker, SocketCall, pickled_call
from aioverbs._pool.supervisor import Counts, Supervisor, WorkerHandle
from aioverbs._pool.thread_worker import ThreadWorker
from aioverbs._pool.worker import WorkerSettings
from aioverbs._verbs.device import Device
from aioverbs._verbs.protection_domain import DomainShare, ProtectionDomain, share_domain
from aioverbs.errors import VerbsError

__all__ = ["ProcessBackend", "SocketCallFactory", "ThreadBackend"]

SocketCallFactory = Callable[[socket.socket, Callable[[bool], object]], object]
"""Function that takes a socket and a callback for a bool, and returns the payload of a call: see `SocketCall`."""


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
        """Return None: a pool of threads has no owner, so any event loop may close it."""
        return None

    def open(self) -> None:
        """Check that an asyncio event loop is running. Worker threads need no other preparation.

        :raises RuntimeError: no asyncio event loop is running.
        """
        running_loop()

    def spawn(self, supervisor: Supervisor, number: int, counts: Counts) -> WorkerHandle:
        """Return the handle of a new worker thread, which is not started yet.

        :param supervisor: supervisor of the pool.
        :param number: number of the worker in its pool.
        :param counts: counts of the worker and of the workers that it replaces.
        """
        return ThreadWorker(supervisor, number, counts, self._device, self._pd, self._settings)

    def make_payload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> object:
        """Return the payload of a call for `Supervisor.send`: the tuple ``(function, args)``."""
        return function, args

    def socket_call_factory(self, function: Callable[..., Any], args: tuple[Any, ...]) -> SocketCallFactory:
        """Return a factory of calls that pass a socket and a callback to a function.

        :param function: function that a worker calls with a socket, a callback that takes a bool, and `args`.
        :param args: further positional arguments of the function.
        :returns: function that takes the socket and the callback of one call, and returns the payload of that call for
            `Supervisor.send`.
        """
        return lambda sock, report: (function, (sock, report, *args))


class ProcessBackend(ThreadBackend):
    """Backend whose workers are processes."""

    _owner: Affinity
    _process_settings: ProcessSettings

    def __init__(self, device: Device, pd: ProtectionDomain, settings: WorkerSettings) -> None:
        super().__init__(device, pd, settings)
        self._domain_share: DomainShare | None = None

    def owner(self) -> Affinity | None:
        """Return the running loop and its thread as the owner: only that loop communicates with the workers.

        :raises RuntimeError: no asyncio event loop is running.
        """
        return Affinity.of_running_loop()

    def open(self) -> None:
        """Prepare the settings of the worker processes, and share the pool's protection domain if the device can.

        A domain that was shared before, for example by another pool, stays shared in the same way until it is closed.
        If the device cannot share it between processes, each worker will open a protection domain of its own.

        :raises VerbsError: sharing the domain failed with an ``errno`` other than EOPNOTSUPP: with EEXIST if the domain
            is an instance of a domain that was shared elsewhere. The domain stays open.
        :raises OSError: on an RDMA device: with EMFILE if no file descriptor is left. The domain stays open.
        :raises RuntimeError: no asyncio event loop is running. In this case nothing is done.
        """
        self._owner = Affinity.of_running_loop()
        share: DomainShare | None = None
        try:
            share = share_domain(self._pd)
        except VerbsError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        self._domain_share = share
        shared = (share.id, share.key) if share is not None else None
        self._process_settings = ProcessSettings.of(self._device, self._settings, shared)

    def spawn(self, supervisor: Supervisor, number: int, counts: Counts) -> WorkerHandle:
        """Return the handle of a new worker process, which is not started yet.

        :param supervisor: supervisor of the pool.
        :param number: number of the worker in its pool.
        :param counts: counts of the worker and of the workers that it replaces.
        """
        return ProcessWorker(supervisor, number, counts, self._owner, self._process_settings, self._domain_share)

    def make_payload(self, function: Callable[..., Any], args: tuple[Any, ...]) -> object:
        """Return the payload of a call for `Supervisor.send`: the function and its arguments as pickled bytes.

        :raises pickle.PicklingError: `function` or an argument cannot be pickled; `pickle` may raise other exceptions
            instead.
        """
        return pickled_call(function, args)

    def socket_call_factory(self, function: Callable[..., Any], args: tuple[Any, ...]) -> SocketCallFactory:
        """Return a factory of calls that pass a socket and a callback to a function.

        :param function: function that a worker calls with a socket, a callback that takes a bool, and `args`.
        :param args: further positional arguments of the function.
        :returns: function that takes the socket and the callback of one call, and returns a `SocketCall`, the payload
            of that call for `Supervisor.send`.
        :raises pickle.PicklingError: `function` or an argument cannot be pickled; `pickle` may raise other exceptions
            instead.
        """
        return functools.partial(SocketCall, pickled_call(function, args))
