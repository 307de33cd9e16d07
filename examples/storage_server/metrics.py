"""Counters of the server, in the Prometheus text format, made with `prometheus_client`.

One-sided reads and writes are not counted: no code of the server runs for them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

_SYNC_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_GROUP = (1, 2, 4, 8, 16, 32, 64)
_MAX_UNCOUNTED = 64


class Metrics(Collector):
    """Counters of one server. Any thread may use them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)  # before the metrics whose counts are applied lazily
        self._synced: deque[tuple[float, int]] = deque()
        to: Any = {"namespace": "storage", "registry": self.registry}
        self.requests = Counter("requests", "Requests that were answered", ["kind", "outcome"], **to)
        self.read_bytes = Counter("message_read_bytes", "Bytes that were read by messages", **to)
        self.written_bytes = Counter("message_written_bytes", "Bytes that were written by messages", **to)
        self.sessions = Gauge("sessions", "Clients that are connected", **to)
        self.refused = Counter("refused_clients", "Clients that failed to authenticate", **to)
        self.grants = Gauge("grants", "Open volumes whose memory is granted to a client", ["mode"], **to)
        self.cached = Gauge("cached_bytes", "Memory of all file caches", **to)
        self.syncs = Histogram("sync_seconds", "Duration of a disk sync", buckets=_SYNC_S, **to)
        self.groups = Histogram("sync_flushes", "Flushes that shared a disk sync", buckets=_GROUP, **to)

    def synced(self, duration_s: float, flushes: int) -> None:
        """Record a sync of the disk. The counters are updated later, since a client is waiting for its answer.

        :param duration_s: duration of the sync in seconds.
        :param flushes: number of flushes that shared the sync.
        """
        self._synced.append((duration_s, flushes))

    def answered(self, kind: str, outcome: str) -> None:
        """Record the answer to a request.

        :param kind: name of the request, in lower case.
        :param outcome: ``"done"`` or ``"failed"``.
        """
        self.requests.labels(kind, outcome).inc()
        if len(self._synced) >= _MAX_UNCOUNTED:
            self._count()

    def collect(self) -> Iterable[Metric]:
        """Apply the syncs recorded so far, before the registry collects the other metrics.

        :returns: an empty sequence, since this object has no metrics of its own.
        """
        self._count()
        return ()

    def _count(self) -> None:
        """Update the counters with the syncs that were recorded since the last update."""
        while True:
            try:
                duration_s, flushes = self._synced.popleft()
            except IndexError:
                return
            self.syncs.observe(duration_s)
            self.groups.observe(flushes)

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 if there is no such metric.

        :param name: name without the prefix ``storage_``.
        :param labels: labels of the metric.
        """
        return self.registry.get_sample_value(f"storage_{name}", labels) or 0.0

    def serve(self, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
        """Answer `GET /metrics` in a thread.

        :param port: TCP port; 0 for a free one.
        :param host: address to listen on.
        :returns: the port, and a function that stops the thread, which the caller must call.
        :raises OSError: the port is taken.
        """
        server, thread = start_http_server(port, host, self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop
