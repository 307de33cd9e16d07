"""Forking while other threads are in calls that lock libibverbs or librdmacm."""

import os
import subprocess
import sys
import threading

import pytest

from aioverbs._core.handles.library_lock import library_lock

FORKS = 40
PROGRAM = f"""
import os, sys, threading, time
from aioverbs import LibraryNotFoundError, VerbsError
from aioverbs._core.handles import handles, rdma_cm

def list_devices():
    handles.device_names()

def import_device():
    handles.Context.import_device(null)

def make_channel():
    rdma_cm.EventChannel().destroy()

def call(function):
    try:
        function()
    except VerbsError:
        pass

def repeat(function):
    while True:
        call(function)

busy, tried = map(globals().__getitem__, sys.argv[1:])
null = os.open(os.devnull, os.O_RDONLY)
try:
    call(tried)
    call(busy)
except LibraryNotFoundError:
    sys.exit(77)
for _ in range(2):
    threading.Thread(target=repeat, args=(busy,), daemon=True).start()
for number in range({FORKS}):
    child = os.fork()
    if child == 0:
        call(tried)
        os._exit(0)
    deadline = time.monotonic() + 10
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            print(f"child {{number}} hangs")
            os._exit(1)
        time.sleep(0.001)
os._exit(0)
"""


@pytest.mark.parametrize("busy", ["list_devices", "import_device", "make_channel"])
@pytest.mark.parametrize("tried", ["list_devices", "make_channel"])
def test_a_forked_child_can_use_the_libraries(busy: str, tried: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Since Python 3.12, forking while there are threads is a DeprecationWarning.
    command = [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-c", PROGRAM, busy, tried]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("a library is missing")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_lock_is_free_in_parent_and_child_of_a_fork() -> None:
    def is_free() -> bool:
        found: list[bool] = []

        def try_lock() -> None:
            found.append(library_lock.acquire(blocking=False))
            if found[0]:
                library_lock.release()

        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        return found[0]

    child = os.fork()
    if child == 0:
        os._exit(0 if is_free() else 1)
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), is_free()) == (0, True)
    with library_lock:
        assert not is_free()
