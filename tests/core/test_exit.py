"""Exit of the interpreter with everything open: no crash, no message."""

import subprocess
import sys
import textwrap

import pytest

from tests.conftest import ROOT
from tests.pace import patience

PREAMBLE = f"""
import os, sys, threading
sys.path.append({str(ROOT)!r})
from aioverbs import SendFlags, SendOpcode
from aioverbs._core.handles import handles, parent_domain
from tests.core.allocators import Recording
from tests.core.pairs import connect, make_end, make_pair
from tests.core.contexts import open_context
from tests.raw_verbs import post_send

def make_busy_pair(mode="thread-delayed", delay_ns=20_000_000, count=100):
    near, far = make_pair(open_context(mode, delay_ns), "thread domain", size=1 << 20)
    for _ in range(count):
        post_send(near.qp,
            SendOpcode.RDMA_WRITE, [near.sge()], remote_addr=far.region.address, rkey=far.region.rkey
        )
    return near, far
"""

SCRIPTS = {
    "executing in the middle of destruction": """
        import atexit, time
        atexit.register(time.sleep, 0.03)  # runs before the core's own
        make_busy_pair(delay_ns=25_000_000)
    """,
    "several contexts": """
        references = [make_busy_pair(), make_busy_pair('inline'), make_busy_pair(delay_ns=0), make_busy_pair(count=0)]
    """,
    "sys.exit in a function": """
        def main():
            cycle = [make_busy_pair()]
            cycle.append(cycle)
            sys.exit(0)
        main()
    """,
    "with an allocator": """
        domain = parent_domain.ParentDomain(handles.ProtectionDomain(open_context("thread")), None, Recording())
        near, far = make_end(domain), make_end(domain)
        connect(near.qp, far.qp)
        post_send(near.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
    """,
    "memory that is freed": """
        near, far = make_busy_pair()
        near.memory = far.memory = None
        near = far = None
    """,
    "a daemon thread inside": """
        def work():
            while True:
                make_busy_pair("inline", count=10)
        threading.Thread(target=work, daemon=True).start()
        import time
        time.sleep(0.05)
    """,
    "a fork that ends as usual": """
        near, far = make_busy_pair()
        import warnings
        from tests.core.children import wait_for_thread_starts
        warnings.simplefilter("ignore", DeprecationWarning)
        wait_for_thread_starts()
        child = os.fork()
        if not child:
            references = make_busy_pair()
        else:
            assert os.waitpid(child, 0)[1] == 0
    """,
    "destroyed at exit by the user": """
        import atexit
        from aioverbs.testing import destroy_all
        near, far = make_busy_pair()
        atexit.register(lambda: destroy_all(handles.open_handles()))
    """,
    "destroyed after the core's own": """
        import atexit
        from aioverbs.testing import destroy_all
        near, far = make_busy_pair()
        from aioverbs._core.software import software
        atexit.unregister(software._halt_devices)
        software._halt_devices()
        post_send(near.qp, SendOpcode.RDMA_WRITE)
        destroy_all(handles.open_handles())
        assert handles.open_handles() == []
    """,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_interpreter_exits_silently(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-X", "dev", "-W", "error", "-c", PREAMBLE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=patience(50),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_exception_is_still_reported() -> None:
    script = PREAMBLE + "near, far = make_busy_pair()\nraise LookupError('the one reason')"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=patience(50))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "LookupError: the one reason"
