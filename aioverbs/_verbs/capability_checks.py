"""PURE: whether a device has queues as deep, and lists of pieces as long, as were asked for."""

from aioverbs.attributes import DeviceAttributes, QpCapabilities
from aioverbs.types import QpType

__all__ = ["check_completion_queue", "check_queue_pair", "check_shared_receive_queue"]


def check_queue_pair(
    name: str,
    device: DeviceAttributes,
    wanted: QpCapabilities,
    qp_type: QpType,
    *,
    receives: bool = True,
) -> None:
    """What a queue pair is asked for. The most that can go inline is told by no attribute of a device.

    :param name: of the device.
    :param receives: it has a receive queue of its own.
    :raises ValueError: it is more than the device has, or a negative number; all that is wrong is said.
    """
    asked: list[tuple[str, int, int | None]] = [
        ("max_send_wr", wanted.max_send_wr, device.max_qp_wr),
        ("max_send_sge", wanted.max_send_sge, device.max_sge),
        ("max_inline_data", wanted.max_inline_data, None),
    ]
    if receives:
        route = qp_type is QpType.UD  # of a datagram, which is received into a piece of its own
        asked += [
            ("max_recv_wr", wanted.max_recv_wr, device.max_qp_wr),
            ("max_recv_sge", wanted.max_recv_sge, device.max_sge - route),
        ]
    _check(name, *asked)


def check_completion_queue(
    name: str, device: DeviceAttributes, depth: int, comp_vector: int = 0, comp_vectors: int = 1
) -> None:
    """What a completion queue is asked for.

    :param comp_vectors: how many interrupt vectors the context has.
    :raises ValueError: it is more than the device has.
    """
    _check(name, ("depth", depth, device.max_cqe), ("comp_vector", comp_vector, max(comp_vectors, 1) - 1))


def check_shared_receive_queue(name: str, device: DeviceAttributes, max_wr: int, max_sge: int) -> None:
    """What a shared receive queue is asked for.

    :raises ValueError: it is more than the device has.
    """
    _check(name, ("max_wr", max_wr, device.max_srq_wr), ("max_sge", max_sge, device.max_srq_sge))


def _check(name: str, *asked: tuple[str, int, int | None]) -> None:
    wrong = [
        f"{what} is {value:,} and {name} has {'0 or more' if most is None or value < 0 else f'at most {most:,}'}"
        for what, value, most in asked
        if value < 0 or (most is not None and value > most)
    ]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: ask for less")
