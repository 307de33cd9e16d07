"""Messages, attributes and base classes of errors."""

import copy
import errno
import inspect
import pickle

import anyio
import pytest

from aioverbs import errors
from aioverbs.types import QpState, QpType, WcOpcode, WcStatus


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.VerbsError("ibv_create_qp", errno.EINVAL),
            "ibv_create_qp failed: EINVAL (Invalid argument): "
            "an argument does not fit the limits of the device or port, or the state of the object",
        ),
        (
            errors.VerbsError("ibv_alloc_td", errno.EOPNOTSUPP),
            "ibv_alloc_td failed: EOPNOTSUPP (Operation not supported): this device or its driver does not support it",
        ),
        (
            errors.VerbsError("ibv_reg_mr", errno.ENOMEM, "raise the limit"),
            "ibv_reg_mr failed: ENOMEM (Cannot allocate memory): raise the limit",
        ),
        (errors.VerbsError("ibv_x", errno.EXDEV), "ibv_x failed: EXDEV (Invalid cross-device link)"),
        (errors.VerbsError("ibv_x", 4000), "ibv_x failed: error 4000 (Unknown error 4000)"),
        (
            errors.WorkCompletionError(WcStatus.RNR_RETRY_EXC_ERR, WcOpcode.SEND, 0x2A, 17),
            "SEND on queue pair 17 ended with RNR_RETRY_EXC_ERR (vendor error 0x2a): "
            "the peer had no receive posted, and the RNR retries ran out: post more receives there, or raise rnr_retry",
        ),
        (
            errors.WorkCompletionError(WcStatus.GENERAL_ERR, None, 0, 17),
            "a work request on queue pair 17 ended with GENERAL_ERR (vendor error 0x0)",
        ),
        (
            errors.UnreachableError("rdma_resolve_addr", errno.ENODEV),
            "rdma_resolve_addr failed: ENODEV (No such device): "
            "no RDMA device has a route to that address; none has one to a loopback address: see `rdma link`",
        ),
        (
            errors.ConnectionRejectedError(8, b"why"),
            "the peer refused the connection: no program listens at that port (reason 8)",
        ),
        (
            errors.ConnectionRejectedError(99),
            "the peer refused the connection: unknown reason (reason 99)",
        ),
        (errors.DeviceRemovedError("the device was removed"), "the device was removed"),
        (
            errors.LibraryNotFoundError("librdmacm.so.1"),
            "librdmacm.so.1 cannot be loaded: install librdmacm1 (Debian, Ubuntu) or librdmacm (Fedora, RHEL)",
        ),
        (errors.ForkedProcessError("soft0"), "soft0 was opened before the fork: open the device again in this process"),
        (
            errors.BorrowedObjectClosedError("<MemoryRegion>"),
            "<MemoryRegion> uses a pyverbs object that was closed: "
            "close objects of aioverbs before the pyverbs objects that they were made from",
        ),
        (errors.DeviceNotFoundError("mlx5_0", ["soft0"]), "there is no device 'mlx5_0'; available: soft0"),
        (errors.DeviceNotFoundError("mlx5_0"), "there is no device 'mlx5_0'; available: none"),
        (
            errors.LibraryNotFoundError("libibverbs.so.1", "no such file"),
            "libibverbs.so.1 cannot be loaded: install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or "
            "libibverbs (Fedora, RHEL) (no such file)",
        ),
        (
            errors.LibraryNotFoundError("libibverbs.so.1", "undefined symbol: ibv_reg_mr", outdated=True),
            "libibverbs.so.1 is too old: install rdma-core 44 or newer (undefined symbol: ibv_reg_mr)",
        ),
        (errors.BusyResourceError("the queue pair is still open"), "the queue pair is still open"),
        (
            errors.TransitionError(
                QpType.UC, QpState.INIT, QpState.RTR, ("av", "rq_psn"), ("qkey",), {"path_mtu": "9, which is none"}
            ),
            "cannot move a queue pair of type UC from INIT to RTR: attributes are missing: av, rq_psn; "
            "not allowed in this transition: qkey; path_mtu: 9, which is none",
        ),
        (
            errors.TransitionError(QpType.RC, QpState.RESET, QpState.RTS, reachable=(QpState.RESET, QpState.INIT)),
            "cannot move a queue pair of type RC from RESET to RTS: there is no such transition; "
            "reachable from RESET: RESET, INIT",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_message_survives_pickling_and_copying(error: Exception, message: str) -> None:
    assert str(error) == message
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == message
        assert vars(twin) == vars(error)


def test_verbs_error_is_an_os_error() -> None:
    error = errors.VerbsError("ibv_create_qp", errno.ENOMEM)
    assert isinstance(error, OSError)
    assert (error.verb, error.errno) == ("ibv_create_qp", errno.ENOMEM)


def test_work_completion_error_has_its_parts() -> None:
    error = errors.WorkCompletionError(WcStatus.REM_ACCESS_ERR, WcOpcode.RDMA_READ, 3, 4)
    assert (error.status, error.opcode, error.vendor_err, error.qp_num) == (10, 2, 3, 4)


def test_batch_error_is_that_of_the_first_that_failed() -> None:
    first = errors.WorkCompletionError(WcStatus.REM_ACCESS_ERR, WcOpcode.RDMA_WRITE, 0, 17)
    flushed = errors.WorkCompletionError(WcStatus.WR_FLUSH_ERR, WcOpcode.RDMA_READ, 0, 17)
    error = errors.BatchError([None, first, flushed])
    for twin in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is errors.BatchError
        assert (twin.index, twin.status, twin.opcode, twin.qp_num) == (1, WcStatus.REM_ACCESS_ERR, first.opcode, 17)
        assert list(map(str, twin.errors)) == ["None", str(first), str(flushed)]
        assert str(twin) == f"request 1 of 3 in a batch failed, and 1 others: {first}"
    refused = errors.BatchError([errors.VerbsError("ibv_post_send", errno.ENOMEM)])
    assert (refused.index, refused.status) == (0, WcStatus.GENERAL_ERR)
    assert str(refused) == f"request 0 of 1 in a batch failed: {refused.errors[0]}"


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (errors.ClosedResourceError, anyio.ClosedResourceError),
        (errors.BrokenResourceError, anyio.BrokenResourceError),
        (errors.BusyResourceError, anyio.BusyResourceError),
        (errors.ForkedProcessError, errors.ClosedResourceError),
        (errors.AffinityError, RuntimeError),
        (errors.ConcurrentAccessError, RuntimeError),
        (errors.BatchError, errors.WorkCompletionError),
        (errors.QueuePairStateError, RuntimeError),
        (errors.DeviceNotFoundError, LookupError),
        (errors.LibraryNotFoundError, OSError),
        (errors.TransitionError, ValueError),
        (errors.UnreachableError, errors.VerbsError),
        (errors.ConnectionRejectedError, ConnectionRefusedError),
        (errors.DeviceRemovedError, errors.BrokenResourceError),
    ],
)
def test_bases(ours: type[Exception], base: type[Exception]) -> None:
    assert issubclass(ours, base)


def test_each_error_is_documented() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    inherited = [each for each in classes if not each.__doc__ or each.__doc__ == inspect.getdoc(each.__mro__[1])]
    assert inherited == []
