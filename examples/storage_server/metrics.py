"""What a server counts, in Prometheus' text form: `prometheus_client` does all of it.

One-sided reads and writes are not here: no program of the server's is there to count them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

_SYNC_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_GROUP = (1, 2, 4, 8, 16, 32, 64)
_UNCOUNTED_MOST = 64


class Metrics(Collector):
    """The counts of one server. Any thread may count."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)  # before all that it counts late
        self._synced: deque[tuple[float, int]] = deque()
        to: Any = {"namespace": "storage", "registry": self.registry}
        self.requests = Counter("requests", "Requests that were answered", ["kind", "outcome"], **to)
        self.read_bytes = Counter("message_read_bytes", "Bytes that were read by messages", **to)
        self.written_bytes = Counter("message_written_bytes", "Bytes that were written by messages", **to)
        self.sessions = Gauge("sessions", "Clients that are connected", **to)
        self.refused = Counter("refused_clients", "Clients that did not prove who they are", **to)
        self.grants = Gauge("grants", "Volumes that clients reach one-sidedly", ["mode"], **to)
        self.cached = Gauge("cached_bytes", "Memory of the caches before files", **to)
        self.syncs = Histogram("sync_seconds", "How long the disk took to make things durable", buckets=_SYNC_S, **to)
        self.groups = Histogram("sync_flushes", "Flushes that one of these was for", buckets=_GROUP, **to)

    def synced(self, lasted_s: float, flushes: int) -> None:
        """The disk was asked to make something durable. A client waits for that to be answered: it is counted later."""
        self._synced.append((lasted_s, flushes))

    def answered(self, kind: str, outcome: str) -> None:
        """A client has the answer to a request."""
        self.requests.labels(kind, outcome).inc()
        if len(self._synced) >= _UNCOUNTED_MOST:
            self._count()

    def collect(self) -> Iterable[Metric]:
        """Nothing of its own, but what follows is all that there is to know."""
        self._count()
        return ()

    def _count(self) -> None:
        while True:
            try:
                lasted_s, flushes = self._synced.popleft()
            except IndexError:
                return
            self.syncs.observe(lasted_s)
            self.groups.observe(flushes)

    def value(self, name: str, **labels: str) -> float:
        """What was counted so far; 0 where nothing was."""
        return self.registry.get_sample_value(f"storage_{name}", labels) or 0.0

    def serve(self, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
        """Answer `GET /metrics`, in a thread; the port, and what ends that."""
        server, thread = start_http_server(port, host, self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop
