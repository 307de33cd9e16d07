"""PURE: sizes and times of a connection."""

import functools
import math
from dataclasses import dataclass

from aioverbs._connection.credits import MAX_CREDITS
from aioverbs._exports import publish
from aioverbs._verbs.qp_defaults import RETRIES
from aioverbs._verbs.qp_state_machine import QpAttrs

__all__ = ["ConnectionSettings"]

_MIN_KEEP_ALIVE_S = 0.1
_MAX_TIMEOUT_CODE = 31  # largest code of ibv_qp_attr.timeout, about 2.4 hours
_TIMEOUT_TOLERANCE = 4  # devices may wait up to 4 times as long as the code says


@dataclass(frozen=True)
class ConnectionSettings:
    """Sizes and times of one end of a connection. The settings of the two ends may differ.

    The buffers are registered memory: `receive_depth` + 2 + `send_buffers` buffers of `buffer_size` bytes each.

    :param buffer_size: size of a buffer in bytes, 512..2**30. Longer messages are sent in fragments. Those of 192 KiB
        or more are read by the peer.
    :param receive_depth: number of receives kept posted, 4..1023, which limits the fragments in flight from the peer.
        One eighth of them, rounded down, is kept for answers to long messages that this end sends.
    :param send_buffers: number of fragments that may be in flight to the peer, 1..2**16.
    :param send_depth: number of work requests that may be in flight, one-sided ones included; at least `send_buffers` +
        4, at most 2**16. Further requests wait.
    :param max_message: size of the longest message accepted from the peer, in bytes, 1..2**64-1. A peer can make the
        receive calls map and register that much memory before it sends the first byte.
    :param max_grants: largest number of the peer's grants that may exist at the same time, 0..65535.
    :param keep_alive_s: time in seconds, at least 0.1, after which a silent peer counts as lost; None for no limit. On
        RDMA devices, a lost peer is detected within that time. On the software device, the peer's process must answer:
        requests are repeated for that long, so that a stopped process is tolerated, and an idle connection detects the
        loss after up to 1.5 times as long. A process that has ended is detected at once through the TCP connection.
        On the software device, a connection with little traffic also gives the pages of its buffers back to the kernel,
        at each quarter of that time; with None, only when it is closed.
    :param close_timeout_s: longest time in seconds that closing waits for sent messages to be delivered, 0 or more.
    :param spin_ns: time in nanoseconds for which an await polls, if the domain's message model polls; None for the
        default of `CompletionQueue`. Longer polling delays other tasks on the event loop.
    :param port: port number of the device.
    :param gid_index: index of the port's GID; None for the default of `QueuePair`.
    :raises ValueError: a value is out of its range.
    """

    buffer_size: int = 64 * 1024
    receive_depth: int = 16
    send_buffers: int = 8
    send_depth: int = 16
    max_message: int = 1 << 30
    max_grants: int = 1024
    keep_alive_s: float | None = 30.0
    close_timeout_s: float = 5.0
    spin_ns: int | None = None
    port: int = 1
    gid_index: int | None = None

    def __post_init__(self) -> None:
        ranges = {
            "buffer_size": (512, 1 << 30),
            "receive_depth": (4, MAX_CREDITS),
            "send_buffers": (1, 1 << 16),
            "send_depth": (self.send_buffers + 4, 1 << 16),
            "max_message": (1, (1 << 64) - 1),
            "max_grants": (0, 0xFFFF),
        }
        for name, (minimum, maximum) in ranges.items():
            if not minimum <= getattr(self, name) <= maximum:
                value = getattr(self, name)
                raise ValueError(f"`{name}` must be from {minimum:,} to {maximum:,}, got {value:,}")
        if self.keep_alive_s is not None and not self.keep_alive_s >= _MIN_KEEP_ALIVE_S:
            raise ValueError(
                f"`keep_alive_s` must be {_MIN_KEEP_ALIVE_S} or more, or None for never, got {self.keep_alive_s}"
            )
        if not self.close_timeout_s >= 0:
            raise ValueError(f"`close_timeout_s` must be 0 or more, got {self.close_timeout_s}")

    @property
    def block_size(self) -> int:
        """Total size of all buffers of a connection, in bytes."""
        return (self.receive_depth + 2 + self.send_buffers) * self.buffer_size

    @property
    def completions(self) -> int:
        """Number of completions that a connection needs room for in its completion queue."""
        return self.receive_depth + 1 + self.send_depth

    def repetitions(self, *, software: bool) -> QpAttrs:
        """Return the ``timeout`` and ``retry_cnt`` for ibv_modify_qp that follow from `keep_alive_s`.

        If `keep_alive_s` is None, requests on the software device have no time limit, and those on other devices have
        the library's default limits.

        :param software: whether the queue pair belongs to the software device. If so, all retries together take at
            least `keep_alive_s`. On other devices they take at most half of `keep_alive_s`: a probe is sent in the
            first half, and its failure is detected in the second.
        :returns: a dictionary with both attributes.
        """
        timeout, retry_cnt = _repetitions(self.keep_alive_s, software)
        return QpAttrs(timeout=timeout, retry_cnt=retry_cnt)


@functools.lru_cache
def _repetitions(keep_alive_s: float | None, software: bool) -> tuple[int, int]:
    """Return the ``timeout`` and ``retry_cnt`` that `ConnectionSettings.repetitions` describes."""
    attempts = RETRIES["retry_cnt"] + 1
    if keep_alive_s is None:
        return 0 if software else RETRIES["timeout"], attempts - 1
    if software:
        codes = (code for code in range(1, _MAX_TIMEOUT_CODE) if _seconds(code) * attempts >= keep_alive_s)
        timeout = next(codes, _MAX_TIMEOUT_CODE)
        attempts = math.ceil(min(keep_alive_s / _seconds(timeout), attempts))
    else:
        timeout = RETRIES["timeout"]
        while timeout > 1 and _seconds(timeout) * attempts * _TIMEOUT_TOLERANCE > keep_alive_s / 2:
            timeout -= 1
    return timeout, attempts - 1


def _seconds(code: int) -> float:
    """Return the duration, in seconds, that a value of ``ibv_qp_attr.timeout`` stands for."""
    return 4.096e-6 * 2.0**code


publish(__name__)
