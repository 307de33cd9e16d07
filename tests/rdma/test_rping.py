"""examples/rping.py with rdma-core's rping as the peer, in both roles."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.cm import address_of, free_port, nothing_left
from tests.rdma.seam import rdma_devices

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

EXAMPLE = (sys.executable, "-P", "-W", "error", str(Path(__file__).parents[2] / "examples" / "rping.py"))
RPING = ("stdbuf", "-oL", "rping")
LIMIT_S = 120  # starting Python takes long on an emulated machine


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    with nothing_left():
        yield


@contextlib.contextmanager
def running(*command: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def output(process: "subprocess.Popen[str]", status: int = 0) -> list[str]:
    """Return all output of a process, which must end by itself."""
    printed, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, printed
    return printed.splitlines()


def wait_listening(port: int) -> None:
    """Wait until a port is listened on: rping does not print that."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        told = subprocess.run(("rdma", "-j", "resource", "show", "cm_id"), check=True, capture_output=True, text=True)
        if any(each["src-addr"].endswith(f":{port}") for each in json.loads(told.stdout)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no program listens at port {port}")


def wait_for(process: "subprocess.Popen[str]", start: str) -> None:
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith(start):
            return
    pytest.fail("".join(printed))


def pings(count: int, size: int) -> list[str]:
    """Return the expected output for each ping."""
    letters = "".join(map(chr, range(65, 123)))
    printed = []
    for number in range(count):
        head = f"rdma-ping-{number}: "
        body = (letters * (size // len(letters) + 2))[number % len(letters) :]
        printed.append(f"{head}{body[: size - len(head) - 1]}")
    return printed


PINGS = [(3, 64), *(pytest.param(*each, marks=pytest.mark.rdma_all) for each in ((70, 26), (3, 8000)))]


@pytest.mark.parametrize(("count", "size"), PINGS)
def test_rdma_core_client(count: int, size: int) -> None:
    place = ("-a", address_of(rdma_devices()[0]), "-p", str(free_port()), "-S", str(size))
    with running(*EXAMPLE, "-s", "-v", *place) as server:
        wait_for(server, "listening")
        with running(*RPING, "-c", "-V", "-v", "-C", str(count), *place) as client:
            printed = [line for line in output(client) if line.startswith("ping data: ")]
        assert printed == [f"ping data: {ping}" for ping in pings(count, size)]
        server_output = [line for line in output(server) if "domains are not native" not in line]
        assert server_output == [*(f"server ping data: {ping}" for ping in pings(count, size)), f"{count} pings"]


@pytest.mark.parametrize(("count", "size"), PINGS)
def test_rdma_core_server(count: int, size: int) -> None:
    port = free_port()
    place = ("-a", address_of(rdma_devices()[-1]), "-p", str(port), "-S", str(size))
    with running(*RPING, "-s", "-v", *place) as server:
        wait_listening(port)
        with running(*EXAMPLE, "-c", "-V", "-v", "-C", str(count), *place) as client:
            printed = [line for line in output(client) if "ping" in line]
        assert [line for line in printed if "data" in line] == [f"ping data: {ping}" for ping in pings(count, size)]
        assert printed[-1] == f"{count} pings"
        server_output = [line for line in output(server) if line.startswith("server ping data: ")]
        assert server_output == [f"server ping data: {ping}" for ping in pings(count, size)]


@pytest.mark.rdma_all
def test_our_client_with_our_server() -> None:
    place = ("-a", address_of(rdma_devices()[0]), "-p", str(free_port()))
    with running(*EXAMPLE, "-s", *place) as server:
        wait_for(server, "listening")
        with running(*EXAMPLE, "-c", "-V", "-C", "5", *place) as client:
            assert output(client)[-1] == "5 pings"
        assert output(server)[-1] == "5 pings"


@pytest.mark.rdma_all
def test_a_killed_rdma_core_client() -> None:
    place = ("-a", address_of(rdma_devices()[0]), "-p", str(free_port()))
    with running(*EXAMPLE, "-s", "-v", *place) as server:
        wait_for(server, "listening")
        with running(*RPING, "-c", "-v", *place) as client:
            wait_for(client, "ping data: rdma-ping-20:")
            client.send_signal(signal.SIGKILL)
            client.communicate()
            server.communicate(timeout=LIMIT_S)  # the server notices the disconnect, and ends


@pytest.mark.rdma_all
def test_a_killed_rdma_core_server() -> None:
    port = free_port()
    place = ("-a", address_of(rdma_devices()[-1]), "-p", str(port))
    with running(*RPING, "-s", "-v", *place) as server:
        wait_listening(port)
        with running(*EXAMPLE, "-c", "-v", *place) as client:
            wait_for(client, "ping data: rdma-ping-20:")
            server.send_signal(signal.SIGKILL)
            server.communicate()
            printed = output(client, status=1)
            assert any(line.startswith("aioverbs.") for line in printed), printed
