"""Thread domains, whose resources one thread uses without locks, and the budget of native ones per device."""

import errno
import logging
import threading

from aioverbs._core.handles import handles, parent_domain as core
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, ThreadModel, owner_for
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import Resource
from aioverbs.errors import VerbsError

__all__ = ["ThreadDomain", "ThreadDomainBudget"]

logger = logging.getLogger("aioverbs")

# Errors of providers that have no thread domains, or none left: each one uses registers of the device.
_NO_THREAD_DOMAIN = {errno.EOPNOTSUPP, errno.ENOSPC, errno.ENOMEM}


class ThreadDomainBudget:
    """Budget of the native thread domains of a device. Thread-safe.

    On a NIC each native thread domain takes a hardware register that other objects need as well. The budget also
    remembers which warnings were logged for the device.

    :param limit: maximum number of native thread domains in use at once; None if there is no limit.
    :raises ValueError: the limit is negative.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"`max_native_thread_domains` must be 0 or more, or None for no limit, got {limit}")
        self.limit = limit
        self.used = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one native thread domain from the budget and return True; if the limit is reached, only return False."""
        with self._lock:
            if self.limit is not None and self.used >= self.limit:
                return False
            self.used += 1
            return True

    def destroy(self) -> None:
        """Give one native thread domain back to the budget. `Lifecycle` calls this when it destroys the handles."""
        with self._lock:
            self.used -= 1

    def warn_once(self, what: str, message: str, *arguments: object) -> None:
        """Log a warning, unless a warning with the same key was already logged for this device.

        :param what: key of the warning.
        :param message: message that may contain placeholders of `logging`.
        :param arguments: values of the placeholders.
        """
        with self._lock:
            first = what not in self._warned
            self._warned.add(what)
        if first:
            logger.warning(message, *arguments)


class ThreadDomain(Resource):
    """A thread domain (``ibv_alloc_td``), owned by the event loop that opens it and by that loop's thread.

    Made by `Device.thread_domain`.

    "Any objects created under this thread domain will disable internal locking": only the thread of the event loop that
    opens the thread domain may use these objects, and every call checks this. If the provider has no thread domains
    left, the checks are the same, but the provider continues to use its locks.

    :raises RuntimeError: on opening: no asyncio event loop is running.
    :raises VerbsError: on opening: the verb failed; with ``require_native``, also if no native thread domain is left.
    """

    def __init__(
        self,
        device: Resource,
        context: handles.Context,
        budget: ThreadDomainBudget,
        *,
        require_native: bool = False,
        owner: Affinity | None = None,
    ) -> None:
        super().__init__(device)
        self._context = context
        self._budget = budget
        self._require_native = require_native
        self._explicit_owner = owner
        self._handle: core.ThreadDomain | None = None

    def _owner(self) -> Affinity | None:
        """Return the `Affinity` given to the constructor, or else a new one for the running event loop and its thread.

        :raises RuntimeError: no owner was given, and no asyncio event loop is running.
        """
        return self._explicit_owner or owner_for(ThreadModel.SINGLE)

    def _open(self) -> None:
        """Create the thread domain.

        If no native thread domain is available and ``require_native`` is False, log a warning and continue without one.

        :raises VerbsError: the verb failed; with ``require_native``, also if no native thread domain is left.
        """
        if not self._budget.take():
            reason = f"all {self._budget.limit} native ones are in use (max_native_thread_domains)"
            if self._require_native:
                raise VerbsError("ibv_alloc_td", errno.ENOSPC, reason)
            self._degrade(reason)
            return
        try:
            self._handle = core.ThreadDomain(self._context, affinity=self._lifecycle.owner)
        except BaseException as error:
            self._budget.destroy()
            if not isinstance(error, VerbsError) or error.errno not in _NO_THREAD_DOMAIN or self._require_native:
                raise
            self._degrade(str(error))
        else:
            self._lifecycle.hold(self._budget)
            self._lifecycle.hold(self._handle)

    def _degrade(self, reason: str) -> None:
        """Log a warning, at most once per device, that thread domains are no longer native because of `reason`."""
        message = "%s: thread domains are not native from here on, and the provider uses locks: %s"
        self._budget.warn_once("td", message, self._context.name, reason)

    @property
    def native(self) -> bool:
        """Whether the domain is open and the provider takes no locks for resources that are created on it."""
        return self._handle is not None and self.state is ResourceState.OPEN

    @property
    def handle(self) -> core.ThreadDomain | None:
        """Handle of the native thread domain; None if this thread domain is not native.

        :raises ClosedResourceError: the domain is not open.
        """
        self._check_open()
        return self._handle


publish(__name__)
