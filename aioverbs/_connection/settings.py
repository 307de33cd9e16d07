"""PURE: the sizes and times of a connection."""

import math
from dataclasses import dataclass

from aioverbs._connection.credits import MAX_CREDITS
from aioverbs._exports import publish
from aioverbs._verbs.qp_defaults import RETRIES
from aioverbs._verbs.qp_state_machine import QpAttrs

__all__ = ["ConnectionSettings"]

_MIN_KEEP_ALIVE_S = 0.1
_MAX_TIMEOUT_CODE = 31  # the code of the longest timeout of a queue pair, which is two and a half hours
_SLACK = 4  # devices may take so many times as long


@dataclass(frozen=True)
class ConnectionSettings:
    """The sizes and times of one end of a connection. The two ends need not have the same.

    Its buffers are registered memory: `receive_depth` + 1 + `send_buffers`, of `buffer_size` each.

    :param buffer_size: bytes of a buffer. Longer messages go in fragments.
    :param receive_depth: receives that are kept posted, from 4 to 1023: so many fragments may be on their way here.
    :param send_buffers: fragments that may be on their way to the peer.
    :param send_depth: work requests that may be, one-sided ones as well; those beyond wait for a place.
    :param max_message: the longest message that is taken, in bytes.
    :param max_grants: regions that the peer may have granted at once.
    :param keep_alive_s: how long a peer may give no sign of life, in seconds; None: for ever. On RDMA devices one that
        is gone is noticed within that time. On the software device it is its process that answers, which may be stopped
        for so long: requests are repeated until then, and who is asked for nothing is noticed half as much later. A
        process that ended is noticed at once, by the TCP connection.
    :param close_timeout_s: the longest that closing waits for what was sent to be delivered, in seconds.
    :param spin_ns: how long an await polls, in nanoseconds, where the domain's message model polls; None: see
        `CompletionQueue`. The longer, the later the loop's other tasks have their turn.
    :param port: the device's port that it goes by.
    :param gid_index: which of the port's GIDs; None: see `QueuePair`.
    """

    buffer_size: int = 64 * 1024
    receive_depth: int = 16
    send_buffers: int = 8
    send_depth: int = 32
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
                raise ValueError(f"{name} of a connection is from {minimum:,} to {maximum:,}, not {value:,}")
        if self.keep_alive_s is not None and not self.keep_alive_s >= _MIN_KEEP_ALIVE_S:
            raise ValueError(f"keep_alive_s is {_MIN_KEEP_ALIVE_S} or more, or None for never, not {self.keep_alive_s}")
        if not self.close_timeout_s >= 0:
            raise ValueError(f"close_timeout_s is 0 or more, not {self.close_timeout_s}")

    @property
    def block_size(self) -> int:
        """Bytes of all buffers of a connection."""
        return (self.receive_depth + 1 + self.send_buffers) * self.buffer_size

    @property
    def completions(self) -> int:
        """Those that it can have at once."""
        return self.receive_depth + 1 + self.send_depth

    def repetitions(self, *, software: bool) -> QpAttrs:
        """The ``timeout`` and ``retry_cnt`` of its queue pair.

        :param software: of the software device: all repetitions take `keep_alive_s` at least. Else they are over in
            half of that, so that a sign of life that was asked for in the other half is missed in time.
        """
        attempts = RETRIES["retry_cnt"] + 1
        if self.keep_alive_s is None:
            return QpAttrs(timeout=0 if software else RETRIES["timeout"], retry_cnt=attempts - 1)
        if software:
            codes = (code for code in range(1, _MAX_TIMEOUT_CODE) if _seconds(code) * attempts >= self.keep_alive_s)
            timeout = next(codes, _MAX_TIMEOUT_CODE)
            attempts = math.ceil(min(self.keep_alive_s / _seconds(timeout), attempts))
        else:
            timeout = RETRIES["timeout"]
            while timeout > 1 and _seconds(timeout) * attempts * _SLACK > self.keep_alive_s / 2:
                timeout -= 1
        return QpAttrs(timeout=timeout, retry_cnt=attempts - 1)


def _seconds(code: int) -> float:
    """The time that the code of a queue pair's ``timeout`` stands for."""
    return 4.096e-6 * 2.0**code


publish(__name__)
