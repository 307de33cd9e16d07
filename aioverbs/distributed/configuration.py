"""Settings of the comm backend in `dask.config`, below ``distributed.comm.aioverbs``, and their defaults.

=================  ==============  ====================================================================================
``device``         None            name of the device, as for `aioverbs.shared_device`; None for an active RDMA device,
                                   or soft0 if there is none
``transport``      ``"auto"``      how connections are established, as for `aioverbs.connect`
``message-model``  ``"DEFAULT"``   name of the `aioverbs.MessageModel` by which awaits wait
``buffer-size``    ``"66 KiB"``    `aioverbs.ConnectionSettings.buffer_size`: an array of 64 KiB and its header fit
``receive-depth``  16              `aioverbs.ConnectionSettings.receive_depth`
``send-buffers``   8               `aioverbs.ConnectionSettings.send_buffers`
=================  ==============  ====================================================================================

As for any setting of Dask, an environment variable sets one for a process, such as
``DASK_DISTRIBUTED__COMM__AIOVERBS__DEVICE=mlx5_1`` for one worker. Of the settings of `distributed` itself, the backend
uses ``distributed.comm.timeouts.connect``, ``distributed.comm.timeouts.tcp`` (the time after which a silent peer counts
as lost, and for which closing waits for the peer to receive what was written), ``distributed.comm.socket-backlog``,
``distributed.comm.shard`` and ``distributed.comm.offload``.
"""

import functools
from typing import Any, cast

import dask.config
from dask.utils import parse_bytes, parse_timedelta
from distributed.system import MEMORY_LIMIT

from aioverbs._connection.connect import Transport
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._verbs.completion_queue import MessageModel

__all__ = ["DEFAULTS", "connect_timeout_s", "connection_settings", "device_name", "message_model", "transport"]

DEFAULTS = {
    "device": None,
    "transport": "auto",
    "message-model": MessageModel.DEFAULT.name,
    "buffer-size": "66 KiB",
    "receive-depth": 16,
    "send-buffers": 8,
}
"""Values of settings that are not set."""

_FREE_SENDS = 24  # work requests in flight besides the send buffers: those of grants, credits and one-sided requests

dask.config.update_defaults({"distributed": {"comm": {"aioverbs": DEFAULTS}}})


def _get(name: str) -> Any:
    """Return the setting `name` of the backend."""
    return dask.config.get(f"distributed.comm.aioverbs.{name}", DEFAULTS[name])


def device_name() -> str | None:
    """Return the name of the device to use; None for the device that `aioverbs.shared_device` chooses."""
    return cast("str | None", _get("device"))


def transport() -> Transport:
    """Return how connections are established, which `aioverbs.connect` and `aioverbs.listen` check."""
    return cast(Transport, _get("transport"))


def message_model() -> MessageModel:
    """Return how awaits wait.

    :raises ValueError: the setting is not the name of a `MessageModel`.
    """
    name = str(_get("message-model")).upper()
    if name not in MessageModel.__members__:
        names = ", ".join(MessageModel.__members__)
        raise ValueError(f"`distributed.comm.aioverbs.message-model` must be one of {names}, got {name!r}")
    return MessageModel[name]


def connect_timeout_s() -> float:
    """Return the limit of an attempt to connect, in seconds.

    :raises ValueError: the setting is no time.
    """
    return _seconds(dask.config.get("distributed.comm.timeouts.connect"))


def connection_settings() -> ConnectionSettings:
    """Return the sizes and times of connections. A message may be as long as the memory that this process may use.

    :raises ValueError: a setting is out of its range.
    """
    sizes = _get("buffer-size"), _get("receive-depth"), _get("send-buffers")
    return _settings(*sizes, dask.config.get("distributed.comm.timeouts.tcp"))


# Each connect needs the settings, and making them takes as long as a tenth of the connect over tcp.
@functools.lru_cache
def _settings(
    buffer_size: str | int, receive_depth: int, send_buffers: int, patience: str | float
) -> ConnectionSettings:
    """Return what `connection_settings` describes, from the values of settings in `dask.config`."""
    patience_s = _seconds(patience)
    return ConnectionSettings(
        buffer_size=parse_bytes(buffer_size),
        receive_depth=int(receive_depth),
        send_buffers=int(send_buffers),
        send_depth=int(send_buffers) + _FREE_SENDS,
        max_message=int(MEMORY_LIMIT),
        keep_alive_s=patience_s,
        close_timeout_s=patience_s,  # a worker may be busy for long before it receives a reply
    )


@functools.lru_cache
def _seconds(setting: str | float) -> float:
    """Return a time of `dask.config` in seconds.

    :raises ValueError: the setting is no time.
    """
    return parse_timedelta(setting, default="seconds")
