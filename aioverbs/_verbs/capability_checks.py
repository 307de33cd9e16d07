"""PURE: what a device supports: the depths and scatter/gather lists of queues before they are created, and windows."""

from aioverbs.attributes import DeviceAttributes, QpCapabilities
from aioverbs.types import QpType

__all__ = ["check_completion_queue", "check_queue_pair", "check_shared_receive_queue", "has_windows"]

_WINDOW_FLAGS = 1 << 23 | 1 << 24  # IBV_DEVICE_MEM_WINDOW_TYPE_2A, _2B


def check_queue_pair(
    name: str,
    device: DeviceAttributes,
    wanted: QpCapabilities,
    qp_type: QpType,
    *,
    receives: bool = True,
) -> None:
    """Check the capabilities of a queue pair against the limits of the device.

    Of ``max_inline_data``, only the sign is checked, because no device attribute reports a maximum. The limit of
    ``max_recv_sge`` is one less for UD, because the route (GRH) of a datagram takes one entry.

    :param name: name of the device, for the error message.
    :param device: attributes of the device.
    :param wanted: capabilities to check.
    :param qp_type: type of the queue pair.
    :param receives: whether the queue pair has a receive queue of its own.
    :raises ValueError: a value is negative or exceeds the limit; the message lists all such values.
    """
    asked: list[tuple[str, int, int | None]] = [
        ("max_send_wr", wanted.max_send_wr, device.max_qp_wr),
        ("max_send_sge", wanted.max_send_sge, device.max_sge),
        ("max_inline_data", wanted.max_inline_data, None),
    ]
    if receives:
        route = qp_type is QpType.UD  # route (GRH) of a datagram, received into an entry of its own
        asked += [
            ("max_recv_wr", wanted.max_recv_wr, device.max_qp_wr),
            ("max_recv_sge", wanted.max_recv_sge, device.max_sge - route),
        ]
    _check(name, *asked)


def check_completion_queue(
    name: str, device: DeviceAttributes, depth: int, comp_vector: int = 0, comp_vectors: int = 1
) -> None:
    """Check the depth and completion vector of a completion queue against the limits of the device.

    :param name: name of the device, for the error message.
    :param device: attributes of the device.
    :param depth: number of completions that must fit.
    :param comp_vector: index of the completion vector.
    :param comp_vectors: number of completion vectors that the context has.
    :raises ValueError: a value is negative or exceeds the limit; the message lists all such values.
    """
    _check(name, ("depth", depth, device.max_cqe), ("comp_vector", comp_vector, max(comp_vectors, 1) - 1))


def check_shared_receive_queue(name: str, device: DeviceAttributes, max_wr: int, max_sge: int, limit: int) -> None:
    """Check the sizes and the limit of a shared receive queue against the limits of the device.

    :param name: name of the device, for the error message.
    :param device: attributes of the device.
    :param max_wr: number of receives that can be posted at once.
    :param max_sge: number of scatter/gather entries of a receive.
    :param limit: number of receives below which an event is raised.
    :raises ValueError: a value is negative or exceeds the limit; the message lists all such values.
    """
    _check(
        name,
        ("max_wr", max_wr, device.max_srq_wr),
        ("max_sge", max_sge, device.max_srq_sge),
        ("limit", limit, device.max_srq_wr),
    )


def _check(name: str, *asked: tuple[str, int, int | None]) -> None:
    """Check that values are not negative and do not exceed their maxima.

    :param name: name of the device, for the error message.
    :param asked: a tuple for each value: its name, the value, and its maximum or None if the maximum is unknown.
    :raises ValueError: a value is negative or exceeds its maximum; the message lists all such values.
    """
    wrong = [
        f"`{what}` must be {'0 or more' if value < 0 else f'at most {most:,}'} for {name}, got {value:,}"
        for what, value, most in asked
        if value < 0 or (most is not None and value > most)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def has_windows(device: DeviceAttributes) -> bool:
    """Return whether a device has memory windows of type 2.

    :param device: attributes of the device.
    """
    return bool(device.device_cap_flags & _WINDOW_FLAGS)
