"""examples/asgi.py behind real servers: spawned workers, and workers forked after its import."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.listening import free_port, own_address
from tests.pace import patience
from tests.waiting import wait_until

pytest.importorskip("uvicorn")
import httpx

sys.path.append(str(ROOT / "examples"))

from key_value import MAX_PAIR, NEIGHBOURS, SLOT, slot_offset

pytestmark = pytest.mark.timeout(120)

START_S = 40
HERE, APP = str(Path(__file__).parent), "watched:app"
SERVERS = {
    "uvicorn": [
        *("-m", "uvicorn", "--loop", "asyncio", "--workers", "2", "--host", "{host}", "--port", "{port}"),
        *("--app-dir", HERE, APP),
    ],
    "gunicorn": [
        *("-m", "gunicorn", "--preload", "--workers", "2", "--bind", "{host}:{port}", "--no-control-socket"),
        *("--worker-class", "uvicorn_worker.UvicornWorker", APP),
    ],
}


def wait_for_service(condition: Callable[[], object]) -> None:
    """Wait for a condition, for as long as a start may take."""
    wait_until(condition, START_S)


class Store:
    """The store's process.

    :param env: its environment.
    """

    def __init__(self, env: Mapping[str, str], port: int = 0) -> None:
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / "asgi.py"), "store", own_address(), str(port)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        self.place = self.process.stdout.readline().strip()

    def end(self) -> None:
        """End the store by closing its input. It must report nothing left open."""
        _, complaints = self.process.communicate(timeout=patience(START_S))
        assert (self.process.returncode, complaints) == (0, "")


@dataclass
class Service:
    """A store, and a server in front of it."""

    url: str
    store: Store
    client: "httpx.Client"
    env: Mapping[str, str]
    workers: set[int] = field(default_factory=set)  # process IDs of workers that answered and were not killed

    def request(self, name: str, data: bytes | None = None) -> "httpx.Response":
        """Send a request over a TCP connection of its own, to whichever worker accepts it."""
        method = "GET" if data is None else "PUT"
        answer = self.client.request(method, f"{self.url}/objects/{name}", content=data)
        if "x-worker" in answer.headers:
            self.workers.add(int(answer.headers["x-worker"]))
        return answer

    def get(self, name: str) -> bytes:
        answer = self.request(name)
        assert answer.status_code == 200, answer.text
        content: bytes = answer.content
        return content

    def put(self, name: str, data: bytes) -> None:
        answer = self.request(name, data)
        assert answer.status_code == 204, answer.text

    def wait_for_workers(self, count: int) -> None:
        """Wait until `count` workers have answered."""

        def ask_many() -> bool:
            list(threads.map(self.request, ["nothing", "object"] * 8))
            return len(self.workers) >= count

        self.put("object", b"1")
        with ThreadPoolExecutor(8) as threads:
            wait_for_service(ask_many)


def stopped(pid: int) -> bool:
    """Return whether a process has stopped running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def serving(server: str, folder: Path) -> Iterator[Service]:
    env = {**os.environ, "AIOVERBS_DEVICE": "soft0", "AIOVERBS_SOFT_DIRECTORY": str(folder)}
    store, host, port = Store(env), own_address(), free_port()
    said = folder / "said"
    command = [sys.executable, "-P", *(part.format(host=host, port=port) for part in SERVERS[server])]
    client = httpx.Client(timeout=patience(20), trust_env=False, headers={"Connection": "close"})
    service = Service(f"http://{host}:{port}", store, client, env)

    def answers() -> bool:
        assert process.poll() is None, said.read_text()
        try:
            return service.request("nothing").status_code == 404
        except httpx.ConnectError:
            return False

    with (
        client,
        said.open("wb") as output,
        subprocess.Popen(command, env={**env, "STORE": store.place}, cwd=HERE, stdout=output, stderr=output) as process,
    ):
        try:
            wait_for_service(answers)
            yield service
        finally:
            process.terminate()
            try:
                process.wait(patience(START_S))
            finally:
                process.kill()
                service.store.end()
    output_of_all = said.read_text()
    for pid in service.workers:
        assert f"{pid} left []" in output_of_all
    assert "Traceback" not in output_of_all


@pytest.fixture(scope="module", params=SERVERS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A store and a server for all tests: starting them takes much longer than the tests' requests."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-") as folder, serving(request.param, Path(folder)) as service:
        yield service


def only(server: str) -> pytest.MarkDecorator:
    """Run a test with one of the servers only."""
    return pytest.mark.parametrize("service", [server], indirect=True, scope="module")


def test_workers_return_the_last_object_put(service: Service) -> None:
    """Each worker returns the object that was put last, through whichever worker."""
    sizes = (0, 1, 500, MAX_PAIR - 4)
    service.wait_for_workers(2)
    with ThreadPoolExecutor(8) as threads:
        for turn in range(3):
            objects = {f"{size}": os.urandom(size) for size in sizes}
            list(threads.map(service.put, objects, objects.values()))
            for name, got in zip([*objects] * 8, threads.map(service.get, [*objects] * 8), strict=True):
                assert got == objects[name], (turn, name)
    assert service.request("nothing").status_code == 404
    assert service.request("large", bytes(MAX_PAIR - 4)).status_code == 413
    assert service.request("large", bytes(1 << 20)).status_code == 413


@only("gunicorn")
def test_concurrent_gets_return_whole_objects(service: Service) -> None:
    """A get returns either the old or the new object, and always a whole one."""
    whole = {bytes([each]) * 900 for each in range(4)}
    with ThreadPoolExecutor(4) as threads:
        service.put("object", min(whole))
        puts = [threads.submit(service.put, "object", each) for each in [*whole] * 10]
        seen = set()
        while not all(each.done() for each in puts):
            seen.add(service.get("object"))
        for each in puts:
            each.result()
        assert seen <= whole


@only("uvicorn")
def test_putting_fails_if_all_slots_are_taken(service: Service) -> None:
    """Putting fails if other keys fill all slots for the key."""
    others = ["nothing", "object", "large", "0", "1", "500", str(MAX_PAIR - 4), *map("object-{}".format, range(4))]
    taken = [slot_offset(name.encode()) for name in others]
    names = sorted(map(str, range(1000, 50_000)), key=lambda name: slot_offset(name.encode()))
    groups = (
        (place, list(group)) for place, group in itertools.groupby(names, lambda name: slot_offset(name.encode()))
    )
    together = next(
        group[: NEIGHBOURS + 1]
        for place, group in groups
        if len(group) > NEIGHBOURS and all(abs(place - other) >= NEIGHBOURS * SLOT for other in taken)
    )
    assert [service.request(name, b"x").status_code for name in together] == [204] * NEIGHBOURS + [507]
    assert service.request(together[0], b"y").status_code == 204, "the key has a slot already"


def test_a_killed_worker_is_replaced(service: Service) -> None:
    """Requests of the killed worker fail; later requests are answered by the other worker, and by a replacement."""
    over, begun = threading.Event(), threading.Barrier(5)
    failed: list[float] = []  # start times of failed requests
    done = [0] * 4

    def load(client: int) -> None:
        name = f"object-{client}"
        possible = [b"first" * 100]
        service.put(name, possible[0])
        begun.wait(patience(20))
        for number in range(10**6):
            if over.is_set():
                break
            began = time.monotonic()
            try:
                if number % 2:
                    assert service.get(name) in possible, number
                else:
                    possible.append(bytes([number % 256]) * 900)
                    service.put(name, possible[-1])
                    possible[:-1] = []
            except httpx.TransportError:
                failed.append(began)
            done[client] += 1
        assert service.get(name) in possible

    service.wait_for_workers(2)
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load, client) for client in range(4)]
        try:
            begun.wait(patience(20))
            wait_for_service(lambda: min(done) > 4 or any(each.done() for each in loads))
            before = set(service.workers)
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            wait_for_service(lambda: stopped(victim))
            dead = time.monotonic()
            wait_for_service(lambda: service.workers - before or any(each.done() for each in loads))
        finally:
            over.set()
        for each in loads:
            each.result()
    assert service.workers - before
    service.workers.remove(victim)
    assert len(failed) <= len(loads)
    assert all(began <= dead for began in failed)


@only("gunicorn")
def test_a_restarted_store_is_reached_again(service: Service) -> None:
    service.wait_for_workers(2)
    service.store.end()
    wait_for_service(lambda: [service.request("object").status_code for _ in range(8)] == [503] * 8)
    service.store = Store(service.env, int(service.store.place.rpartition(":")[2]))
    wait_for_service(lambda: [service.request("object").status_code for _ in range(8)] == [404] * 8)
    wait_for_service(lambda: service.request("object", b"2").status_code == 204)
    wait_for_service(
        lambda: [service.request("object").content for _ in range(8)] == [b"2"] * 8
    )  # from the other worker, too
