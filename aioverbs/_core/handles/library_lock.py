"""Lock of the process around the calls of libibverbs and librdmacm that lock mutexes of the whole library.

libibverbs holds a mutex while it lists devices, and librdmacm holds another one while it looks for the device of an
identifier, which lists and opens devices. If another thread forked in the meantime, the mutex would stay locked in the
child, where the next such call would never return. So these calls hold `library_lock`, and a fork waits for it.

A call that waits for a peer, for a daemon (``rdma_resolve_route`` asks ibacm) or for an event must not hold the lock,
because other loops and forks would wait as well. The calls that hold it only read files of the kernel and give it
commands that it answers at once: ``rdma_get_cm_event`` reads from a non-blocking descriptor; ``rdma_destroy_id`` waits
until taken events are acknowledged, which happens without this lock. The lock is reentrant because a finalizer may run,
and fork, in a thread that holds it; that thread is then not inside a call of the library.
"""

import os
import threading

__all__ = ["library_lock"]

library_lock = threading.RLock()
os.register_at_fork(
    before=library_lock.acquire, after_in_parent=library_lock.release, after_in_child=library_lock.release
)
