"""Thread domains, whose thread takes no locks, and how many of them a device may give."""

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

# What a provider says that has no thread domains, or no more of them: registers of the device run out.
_NO_THREAD_DOMAIN = {errno.EOPNOTSUPP, errno.ENOSPC, errno.ENOMEM}


class ThreadDomainBudget:
    """How many native thread domains a device may give at once: on NICs each takes a register that others need, too.

    Thread-safe. With it is remembered what was said once for the device.

    :param limit: None for as many as the provider has.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"max_native_thread_domains is 0 or more, or None for no limit, not {limit}")
        self.limit = limit
        self.used = 0
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one, if there is one."""
        with self._lock:
            if self.limit is not None and self.used >= self.limit:
                return False
            self.used += 1
            return True

    def destroy(self) -> None:
        """Give one back. It is named as what a `Lifecycle` does to its handles."""
        with self._lock:
            self.used -= 1

    def say_once(self, what: str, message: str, *arguments: object) -> None:
        """Log a warning, the first time only."""
        with self._lock:
            first = what not in self._said
            self._said.add(what)
        if first:
            logger.warning(message, *arguments)


class ThreadDomain(Resource):
    """A thread domain: ``ibv_alloc_td``, of the running event loop and its thread.

    "Any objects created under this thread domain will disable internal locking": so they are touched by the thread of
    the loop that opens it and by no other, which is checked at every call. Where the provider has no thread domains,
    or no more of them, the checks stay and so do the provider's locks.

    Made by `Device.thread_domain`.
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
        self._given_owner = owner
        self._handle: core.ThreadDomain | None = None

    def _owner(self) -> Affinity | None:
        return self._given_owner or owner_for(ThreadModel.SINGLE)

    def _open(self) -> None:
        if not self._budget.take():
            reason = f"{self._budget.limit} are in use, which is max_native_thread_domains"
            if self._require_native:
                raise VerbsError("ibv_alloc_td", errno.ENOSPC, f"of the device's native thread domains {reason}")
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
        message = "%s: thread domains are not native from here on, the provider keeps its locks: %s"
        self._budget.say_once("td", message, self._context.name, reason)

    @property
    def native(self) -> bool:
        """Whether it is open and the provider drops its locks for what is made on it."""
        return self._handle is not None and self.state is ResourceState.OPEN

    @property
    def handle(self) -> core.ThreadDomain | None:
        """The verbs object, None where it is not native.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        return self._handle


publish(__name__)
