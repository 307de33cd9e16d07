"""Sharing of protection domains: messages over the socket, refusals, and descriptors that must not leak.

The context is a stand-in whose command descriptor is /dev/null; everything except the verbs is real.
"""

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import pytest_asyncio
from hypothesis import given, strategies as st

from aioverbs import (
    AccessFlags,
    BrokenResourceError,
    ClosedResourceError,
    Device,
    DeviceNotFoundError,
    ProtectionDomain,
    SharedMemoryAllocator,
    VerbsError,
    import_device,
)
from aioverbs._core.handles import handles
from aioverbs._core.software.software import Context as SoftwareContext, ImportedRegion, shared_area
from aioverbs._lifecycle.turns import OPENING, spend
from aioverbs._sharing.exchange import ReceivedShare, ReceivedSoftwareShare, answer, receive
from aioverbs._sharing.messages import Reply, Request, device_of, share_id
from aioverbs._sharing.shared_pd import Share
from aioverbs.errors import LibraryNotFoundError
from tests.capabilities import Capability, needs
from tests.conftest import LOOP_FACTORIES
from tests.core.children import in_child
from tests.descriptors import descriptors, descriptors_at_first, files
from tests.listening import own_address
from tests.pace import patience
from tests.waiting import until

if TYPE_CHECKING:
    from typing_extensions import Buffer

KEY = 0xFEDCBA9876543210
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
GUID = bytes.fromhex("0002c90300a1b2c3")
NUMBER = 0x89ABCDEF
ID = share_id(GUID, "mlx5_0", NUMBER)


class StandIn:
    """Context with only the methods that sharing uses."""

    name = "mlx5_0"

    def __init__(self) -> None:
        self.closed = False

    def query_device(self) -> SimpleNamespace:
        return SimpleNamespace(node_guid=GUID)

    def dup_cmd_fd(self) -> int:
        if self.closed:
            raise ClosedResourceError("it is closed")
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    @property
    def context(self) -> handles.Context:
        return cast(handles.Context, self)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Make /dev/null count as an RDMA device, and return its context."""
    number = os.stat("/dev/null").st_rdev
    monkeypatch.setattr("aioverbs._sharing.exchange.device_numbers", lambda: {(os.major(number), os.minor(number))})
    return StandIn()


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """Provide a socket pair; check at the end that no further descriptor is open, except those of the loop."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        before = descriptors()
        yield near, far
    with contextlib.suppress(TimeoutError):
        await until(lambda: descriptors() <= before)  # a thread closes descriptors received from a peer
    assert files(descriptors() - before) == {}


@pytest.fixture
def shared() -> Iterator[Share]:
    made = Share(NUMBER, KEY, 7, os.memfd_create("test"))
    yield made
    made.destroy()


Ends = tuple[socket.socket, socket.socket]


async def exchange(ends: Ends, stand_in: StandIn, shared: Share, shared_id: int = ID, key: int = KEY) -> ReceivedShare:
    """Run both sides of an exchange; if one side is refused, the other one must fail for the same reason."""
    answered, received = await asyncio.gather(
        answer(ends[0], stand_in.context, shared), receive(ends[1], shared_id, key), return_exceptions=True
    )
    if isinstance(received, VerbsError):
        assert isinstance(answered, VerbsError | ClosedResourceError)
        if isinstance(answered, VerbsError):
            assert answered.errno == received.errno
        raise received
    assert answered is None
    assert isinstance(received, ReceivedShare)
    return received


def close(received_share: ReceivedShare | ReceivedSoftwareShare) -> None:
    received_share.share.destroy()
    received_share.close()


# ---- The exchange


async def test_a_lack_of_descriptors_is_reported_to_the_peer(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    class Lacking:
        number, share_key, pd_handle = shared.number, shared.share_key, shared.pd_handle

        def attach(self, *_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    lacking: Any = Lacking()
    async with asyncio.timeout(patience(20)):
        answered, received = await asyncio.gather(
            answer(ends[0], stand_in.context, lacking), receive(ends[1], ID, KEY), return_exceptions=True
        )
    assert isinstance(answered, OSError)
    assert isinstance(received, VerbsError)
    assert answered.errno == received.errno == errno.EMFILE


async def test_an_exchange(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    before = descriptors_at_first()
    made = await exchange(ends, stand_in, shared)
    new = descriptors() - before
    assert len(new) == 2
    assert not any(os.get_inheritable(int(each)) for each in new)
    assert made.share.pd_handle == 7
    ends[0].send(b"after it")
    assert ends[1].recv(64) == b"after it"  # the whole reply was consumed
    loop = asyncio.get_running_loop()
    assert not any(remove(end) for end in ends for remove in (loop.remove_reader, loop.remove_writer))
    lease = made.share.join()
    assert lease.is_last()
    lease.leave(True, False)
    close(made)
    with pytest.raises(VerbsError, match=r"ENOENT .*its last instance was closed"):
        shared.join()


@pytest.mark.parametrize(
    ("shared_id", "key", "error", "pattern"),
    [
        (ID, KEY ^ 1, errno.EACCES, "the share key is wrong"),
        (ID ^ 1, KEY, errno.ENOENT, "nothing is shared under that id"),
        (
            ID ^ 1 << 32,
            KEY,
            errno.EXDEV,
            "GUID 0002:c903:00a1:b2c2, and mlx5_0 is another one",
        ),
        (ID ^ 1 << 32 ^ 1, KEY ^ 1, errno.EXDEV, "another one"),
        (ID ^ 1, KEY ^ 1, errno.ENOENT, "nothing is shared"),
    ],
    ids=["key", "id", "device", "all", "id and key"],
)
async def test_wrong_ids_and_keys_are_refused(
    ends: Ends, stand_in: StandIn, shared: Share, shared_id: int, key: int, error: int, pattern: str
) -> None:
    with pytest.raises(VerbsError, match=pattern) as caught:
        await exchange(ends, stand_in, shared, shared_id, key)
    assert caught.value.errno == error
    # The socket can be used for another exchange.
    close(await exchange(ends, stand_in, shared))


async def test_a_domain_closed_during_the_exchange(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    stand_in.closed = True
    with pytest.raises(VerbsError, match="ENOENT"):
        await exchange(ends, stand_in, shared)
    stand_in.closed = False
    shared.destroy()
    with pytest.raises(VerbsError, match="ENOENT"):
        await exchange(ends, stand_in, shared)


async def test_request_and_reply_in_pieces(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    """The request byte by byte, and the reply with descriptors attached to separate pieces."""
    near, far = ends
    request = Request.make(ID, KEY, bytes(16))
    answering = asyncio.create_task(answer(near, stand_in.context, shared))
    for each in request.pack():
        far.send(bytes([each]))
        await asyncio.sleep(0)
    await answering
    attached = socket.recv_fds(far, Reply.SIZE, 8)
    assert Reply.parse(attached[0]).proves(KEY, request)
    for each in attached[1]:
        os.close(each)

    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    reply = Reply.make(request, KEY, "mlx5_0", 7).pack()
    near.send(reply[:50])
    await asyncio.sleep(0.01)
    attach(near, reply[50:51], stand_in.dup_cmd_fd())
    await asyncio.sleep(0.01)
    attach(near, reply[51:60], shared.dup_file())
    near.send(reply[60:] + b"next")
    close(await receiving)
    assert far.recv(64) == b"next"  # no byte after the reply was consumed


async def test_partial_sends(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    class Narrow(socket.socket):
        """Socket that sends at most seven bytes at a time."""

        def sendmsg(self, buffers: "Iterable[Buffer]", *rights: Any) -> int:
            return super().sendmsg([memoryview(next(iter(buffers)))[:7]], *rights)

    with Narrow(fileno=os.dup(ends[0].fileno())) as near, Narrow(fileno=os.dup(ends[1].fileno())) as far:
        near.setblocking(False)
        far.setblocking(False)
        before = descriptors_at_first()
        made = await exchange((near, far), stand_in, shared)
        assert len(descriptors() - before) == 2
        close(made)


def attach(sock: socket.socket, data: bytes, *fds: int, flags: int = 0) -> None:
    """Send data with attached descriptors, and close these."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, flags)
    for each in fds:
        os.close(each)


@pytest.mark.parametrize("kinds", ["", "c", "fc", "ff", "cf" * 8], ids=lambda kinds: kinds or "none")
async def test_replies_with_a_wrong_number_of_descriptors(
    ends: Ends, stand_in: StandIn, shared: Share, kinds: str
) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    fds = [stand_in.dup_cmd_fd() if kind == "c" else shared.dup_file() for kind in kinds]
    attach(near, Reply.make(request, KEY, "mlx5_0", 7).pack(), *fds)
    with pytest.raises(VerbsError, match=r"EPROTO .*descriptors"):
        await receiving


@contextlib.contextmanager
def one_free_descriptor() -> Iterator[None]:
    """Limit the process to one more descriptor than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_more_descriptors_than_the_process_limit(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    attach(near, Reply.make(request, KEY, "mlx5_0", 7).pack(), stand_in.dup_cmd_fd(), shared.dup_file())
    with one_free_descriptor(), pytest.raises(VerbsError, match=r"EPROTO .*more than this process can open"):
        await receiving
    assert far.fileno() == -1
    assert not await asyncio.get_running_loop().sock_recv(near, 1)


async def test_unexpected_descriptors_are_refused(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    near, far = ends
    attach(far, Request.make(ID, KEY, bytes(16)).pack(), stand_in.dup_cmd_fd(), stand_in.dup_cmd_fd())
    with pytest.raises(VerbsError, match=r"EPROTO .*attached more than 0 descriptors"):
        await answer(near, stand_in.context, shared)
    assert near.fileno() == -1
    assert not await asyncio.get_running_loop().sock_recv(far, 1)


async def test_descriptors_with_pieces_of_a_request_do_not_accumulate(
    ends: Ends, stand_in: StandIn, shared: Share
) -> None:
    """Received descriptors are closed piece by piece, so that the process does not run out of descriptors."""
    near, far = ends
    before = descriptors_at_first()
    answering = asyncio.create_task(answer(near, stand_in.context, shared))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [far.fileno()] * 200))]
    data = Request.make(ID, KEY, bytes(16)).pack()
    for each in (data[:1], data[1:2], data[2:]):
        far.sendmsg([each], rights)
    with pytest.raises(VerbsError, match=r"EPROTO .*attached more than 0 descriptors"):
        await answering
    assert len(descriptors() - before) <= 200  # descriptors of one piece, being closed by the thread


async def test_a_descriptor_that_is_not_shared_memory(ends: Ends, tmp_path: Path) -> None:
    """The file is refused without any call that could block."""
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    (tmp_path / "file").touch()
    attach(near, Reply.make(request, KEY, "soft0", 0).pack(), os.open(tmp_path / "file", os.O_RDWR))
    with pytest.raises(VerbsError, match=r"EPROTO .*attached 1 descriptors, or not the required"):
        await receiving


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
async def test_a_file_whose_size_can_be_fixed_is_refused(ends: Ends, stand_in: StandIn, seals: int) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    attach(near, Reply.make(request, KEY, stand_in.name, 7).pack(), stand_in.dup_cmd_fd(), file)
    with pytest.raises(VerbsError, match=r"EPROTO .*attached 2 descriptors, or not the required"):
        await receiving


def test_a_file_under_lease_is_not_waited_for() -> None:
    """Opening does not wait until the kernel breaks the lease, after 45 seconds."""
    made = os.memfd_create("test")
    leased = os.open(f"/proc/self/fd/{made}", os.O_RDONLY)
    os.close(made)
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGURG)  # the signal that asks to release the lease; ignored by default
    shared = Share(NUMBER, KEY, 7, leased)
    with pytest.raises(VerbsError, match=r"EPROTO .*lease"):
        shared.join()
    shared.destroy()


def test_a_forked_child_does_not_count_as_an_instance(shared: Share) -> None:
    """The child has copies of the descriptors that hold the locks."""
    first, second = shared.join(), shared.join()
    (begun, begin), (go_on, let_go_on) = os.pipe(), os.pipe()

    def stay() -> None:
        os.write(begin, b"x")
        os.read(go_on, 1)

    forking = threading.Thread(target=in_child, args=(stay,))
    forking.start()
    try:
        os.read(begun, 1)
        first.close()  # as at the death of its process
        assert second.is_last()
        second.leave(last=True, failed=False)
        with pytest.raises(VerbsError, match="ENOENT"):
            shared.join()
    finally:
        os.write(let_go_on, b"x")
        forking.join()
        for end in (begun, begin, go_on, let_go_on):
            os.close(end)


async def test_device_names_are_escaped_in_messages(ends: Ends) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    await asyncio.get_running_loop().sock_recv(near, Request.SIZE)
    near.send(Reply.refuse(errno.EXDEV, "a\x1b[31m\nroot").pack())
    with pytest.raises(VerbsError, match=r"a\?\[31m\?root is another one"):
        await receiving


LINGERS = 20


@pytest.fixture
def lingering() -> Iterator[int]:
    """Provide the last descriptor of a socket with a full buffer, whose close lingers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # otherwise it grows with the sent data
        passed = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    passed.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            passed.send(bytes(1 << 16))
    passed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGERS))
    with other:
        yield passed.detach()


@pytest.mark.parametrize("out_of_band", [False, True])
async def test_closing_a_lingering_socket_does_not_block_the_loop(
    ends: Ends, stand_in: StandIn, shared: Share, lingering: int, out_of_band: bool
) -> None:
    """A thread closes received descriptors."""
    near, far = ends
    data = Request.make(ID, KEY, bytes(16)).pack()
    begin = time.monotonic()
    attach(far, data[:1], lingering, flags=socket.MSG_OOB if out_of_band else 0)
    with pytest.raises(VerbsError, match=r"EPROTO .*attached more than 0 descriptors"):
        await answer(near, stand_in.context, shared)
    assert time.monotonic() - begin < LINGERS / 2


async def test_closing_a_lingering_socket_beyond_the_descriptor_limit(
    ends: Ends, stand_in: StandIn, shared: Share, lingering: int
) -> None:
    near, far = ends
    begin = time.monotonic()
    attach(far, Request.make(ID, KEY, bytes(16)).pack(), stand_in.dup_cmd_fd(), stand_in.dup_cmd_fd(), lingering)
    with one_free_descriptor(), pytest.raises(VerbsError, match=r"EPROTO .*more than this process can open"):
        await answer(near, stand_in.context, shared)
    assert time.monotonic() - begin < LINGERS / 2


async def test_a_peer_without_the_key(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    attach(near, Reply.make(request, KEY ^ 1, "mlx5_0", 7).pack(), stand_in.dup_cmd_fd(), shared.dup_file())
    with pytest.raises(VerbsError, match=r"EACCES .*the peer does not know the share key"):
        await receiving


async def test_a_peer_of_another_version_is_refused(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    near, far = ends
    request = bytearray(Request.make(ID, KEY, bytes(16)).pack())
    request[9] = 2
    far.send(request)
    with pytest.raises(VerbsError, match=r"EPROTONOSUPPORT .*version 2 of the protocol, not 1:"):
        await answer(near, stand_in.context, shared)
    assert Reply.parse(far.recv(Reply.SIZE)).status == errno.EPROTONOSUPPORT


@pytest.mark.parametrize(("how", "count"), [("closed", 0), ("reset", 1), ("closed", Request.SIZE - 1)])
async def test_a_peer_that_disconnects_before_its_request(
    ends: Ends, stand_in: StandIn, shared: Share, count: int, how: str
) -> None:
    near, far = ends
    if how == "reset":
        near.send(b"unread, so that closing resets")
    if count:
        far.send(Request.make(ID, KEY, bytes(16)).pack()[:count])
    answering = asyncio.create_task(answer(near, stand_in.context, shared))
    await asyncio.sleep(0.01)
    far.close()
    with pytest.raises(BrokenResourceError, match=r"the peer (is gone|closed)"):
        await answering


@pytest.mark.parametrize("count", [0, 1, Reply.SIZE - 1])
async def test_a_peer_that_disconnects_before_its_reply(
    ends: Ends, stand_in: StandIn, shared: Share, count: int
) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    if count:
        attach(near, Reply.make(request, KEY, "mlx5_0", 7).pack()[:count], stand_in.dup_cmd_fd(), shared.dup_file())
    near.close()
    with pytest.raises(BrokenResourceError, match=r"the peer closed the socket after \d+ of"):
        await receiving
    with pytest.raises(BrokenResourceError, match="the peer is gone"):
        await receive(far, ID, KEY)


async def test_cancellation_at_each_await(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    near, far = ends

    async def cancelled(task: asyncio.Task[object]) -> None:
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await cancelled(asyncio.create_task(answer(near, stand_in.context, shared)))
    await cancelled(asyncio.create_task(receive(far, ID, KEY)))  # cancelled after its request was sent
    # While sending a reply to a full socket.
    fill(near)
    await cancelled(asyncio.create_task(answer(near, stand_in.context, shared)))
    fill(far)
    await cancelled(asyncio.create_task(receive(far, ID, KEY)))
    # After half of the reply and its descriptors were received.
    one, two = socket.socketpair()
    one.setblocking(False)
    two.setblocking(False)
    with one, two:
        receiving = asyncio.create_task(receive(two, ID, KEY))
        request = Request.parse(await asyncio.get_running_loop().sock_recv(one, Request.SIZE))
        reply = Reply.make(request, KEY, "mlx5_0", 7).pack()
        attach(one, reply[:20], stand_in.dup_cmd_fd(), shared.dup_file())
        await cancelled(receiving)


def fill(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(4096))


async def test_unsupported_sockets(stand_in: StandIn, shared: Share) -> None:
    with socket.socket(socket.AF_UNIX) as blocking, pytest.raises(ValueError, match=r"setblocking\(False\)"):
        await answer(blocking, stand_in.context, shared)
    for family, kind in ((socket.AF_UNIX, socket.SOCK_DGRAM), (socket.AF_INET, socket.SOCK_STREAM)):
        with (
            socket.socket(family, kind) as other,
            pytest.raises(ValueError, match="descriptors need a Unix stream socket"),
        ):
            await receive(other, ID, KEY)


# ---- Messages


@given(st.binary(max_size=200))
def test_invalid_messages(data: bytes) -> None:
    for kind in (Request, Reply):
        with pytest.raises(VerbsError) as caught:
            kind.parse(data)
        assert caught.value.errno == errno.EPROTO


@given(st.data(), st.sampled_from([Request, Reply]))
def test_a_message_with_a_flipped_bit(data: st.DataObject, kind: type[Request] | type[Reply]) -> None:
    request = Request.make(ID, KEY, bytes(range(16)))
    whole = (request if kind is Request else Reply.make(request, KEY, "mlx5_0", 7)).pack()
    assert len(whole) == kind.SIZE
    place = data.draw(st.integers(0, 8 * kind.SIZE - 1))
    flipped = bytearray(whole)
    flipped[place // 8] ^= 1 << place % 8
    head = 8 * (12 if kind is Request else 10)  # magic, version, and in replies the status
    if place < head:
        with pytest.raises(VerbsError, match="EPROTO"):
            kind.parse(bytes(flipped))
        return
    parsed = kind.parse(bytes(flipped))
    if isinstance(parsed, Request):
        assert not parsed.proves(KEY)
    else:
        assert parsed.status or not parsed.proves(KEY, request)


@given(
    st.integers(0, (1 << 96) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=16, max_size=16),
    st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=63),
    st.integers(0, (1 << 32) - 1),
)
def test_message_round_trip(shared_id: int, key: int, nonce: bytes, name: str, handle: int) -> None:
    request = Request.make(shared_id, key, nonce)
    assert Request.parse(request.pack()) == request
    assert request.proves(key)
    reply = Reply.make(request, key, name, handle)
    assert Reply.parse(reply.pack()) == reply
    assert reply.proves(key, request)
    assert not reply.proves(key ^ 1, request)
    assert not reply.proves(key, Request.make(shared_id, key, bytes(15) + b"?"))
    refused = Reply.refuse(errno.ENOENT, name)
    assert Reply.parse(refused.pack()) == refused


@given(st.binary(min_size=1, max_size=2 * Request.SIZE), st.sampled_from(list(LOOP_FACTORIES.values())))
def test_arbitrary_bytes_over_the_socket(data: bytes, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        shared = Share(NUMBER, KEY, 7, os.memfd_create("test"))
        try:
            with near, far:
                far.send(data)
                far.shutdown(socket.SHUT_WR)
                with pytest.raises((VerbsError, BrokenResourceError)):
                    await answer(near, StandIn().context, shared)
        finally:
            shared.destroy()

    factory().close()  # the first loop of uvloop opens descriptors that the process keeps
    before = descriptors()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    assert descriptors() <= before


def test_ids_depend_on_the_device() -> None:
    assert device_of(ID) == "0002:c903:00a1:b2c3"
    assert share_id(GUID, "mlx5_1", NUMBER) == ID
    # Virtual functions may have no GUID: the ID depends on the name then.
    assert share_id(bytes(8), "mlx5_0", 1) != share_id(bytes(8), "mlx5_1", 1)


# ---- The last instance


def test_exactly_one_instance_is_the_last(shared: Share) -> None:
    before = descriptors_at_first()
    first, second, third = shared.join(), shared.join(), shared.join()
    assert not second.is_last()
    second.leave(False, False)
    assert not first.is_last()
    first.leave(False, False)
    fourth = shared.join()
    assert not third.is_last()
    third.leave(False, False)
    assert fourth.is_last()
    with pytest.raises(VerbsError, match="ENOENT"):  # the last instance is being closed
        shared.join()
    fourth.leave(True, True)  # closing failed
    fifth = shared.join()
    fifth.close()
    assert fourth.is_last()
    fourth.leave(True, False)
    with pytest.raises(VerbsError, match="ENOENT"):
        shared.join()
    assert descriptors() == before


def test_an_instance_ends_although_its_file_cannot_be_marked() -> None:
    """The domain is deallocated by then, so it cannot be closed a second time."""
    before = descriptors_at_first()
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    shared = Share(NUMBER, KEY, 7, file)
    instance = shared.join()
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    assert instance.is_last()
    instance.leave(True, False)
    shared.destroy()
    assert descriptors() == before


def test_an_instance_that_stays_does_not_wait_for_others(shared: Share) -> None:
    """Between two kinds of lock the kernel holds none, and another instance can find itself to be the last one."""
    instance, other = shared.join(), shared.join()
    fcntl.flock(instance, fcntl.LOCK_UN)
    assert other.is_last()
    staying = threading.Thread(target=instance.leave, args=(True, True))
    staying.start()
    try:
        staying.join(patience(10))
        assert not staying.is_alive()
    finally:
        other.close()
        staying.join()
        instance.close()


def test_a_dead_process_is_not_counted_as_an_instance(shared: Share) -> None:
    def in_the_child() -> bool:
        return shared.join().is_last()  # ends without leaving

    ours = shared.join()
    assert not in_child(in_the_child)
    assert ours.is_last()
    ours.leave(True, True)
    ours.close()


# ---- Devices


software = needs(Capability.SHARED_DOMAINS, Capability.OBJECT_COUNTS)


@contextlib.asynccontextmanager
async def imported(device: Device, ends: Ends, name: str | None = None) -> AsyncIterator[tuple[ProtectionDomain, ...]]:
    """Provide a domain of a software device, and an instance of it on an imported device."""
    async with device.protection_domain() as pd, pd.share(KEY) as shared:
        sending = asyncio.create_task(shared.send(ends[0]))
        async with import_device(ends[1], shared.id, KEY, name=name) as other:
            await sending
            assert other.name == (name or "soft0")
            with pytest.raises(VerbsError, match=r"EACCES .*the share key is wrong"):
                await other.shared_protection_domain(shared.id, KEY ^ 1).open()
            async with other.shared_protection_domain(shared.id, KEY) as instance:
                yield pd, instance
    with pytest.raises(ClosedResourceError):
        await shared.send(ends[0])


@software
async def test_the_software_device_with_itself(device: Device, ends: Ends) -> None:
    """Within a process, the imported device is another context of the same device."""
    async with imported(device, ends) as (pd, instance):
        assert instance.handle.context is not pd.handle.context
        async with pd.register(100, ACCESS, pd.shared_memory) as region:
            region.buffer[:4] = b"both"
            async with instance.import_memory_region(region.rkey) as there:
                assert (there.address, there.lkey, there.access, len(there)) == (
                    region.address,
                    region.lkey,
                    ACCESS,
                    100,
                )
                assert isinstance(there.handle, ImportedRegion)
                assert there.handle.here == region.address
                there.buffer[2:4] = b"ne"
            assert bytes(region.buffer[:4]) == b"bone"
        assert isinstance(pd.shared_memory, SharedMemoryAllocator)
        assert pd.shared_memory is pd.shared_memory
        assert instance.shared_memory.statistics().pieces == pd.shared_memory.statistics().pieces == 0


@software
async def test_another_software_device_of_this_process(device: Device, ends: Ends) -> None:
    """Works as between processes: each device has its own memory in the domain, and maps that of the other."""
    async with imported(device, ends, f"soft0@{own_address()}:7472") as (pd, instance):
        async with pd.register(100, ACCESS, pd.shared_memory) as region:
            async with instance.import_memory_region(region.rkey) as there:
                assert isinstance(there.handle, ImportedRegion)
                assert there.handle.here != there.address == region.address
                region.buffer[:5] = b"there"
                assert bytes(there.buffer[:5]) == b"there"
                with pytest.raises(VerbsError, match="ibv_import_mr failed: ENOENT"):
                    await instance.import_memory_region(region.rkey ^ 1).open()
            with pytest.raises(ClosedResourceError):
                there.buffer  # noqa: B018
        async with (
            pd.register(100, AccessFlags.REMOTE_READ, pd.shared_memory) as read_only,
            instance.import_memory_region(read_only.rkey) as seen,
        ):
            assert seen.buffer.readonly
        async with instance.register(100) as alone:
            with pytest.raises(VerbsError, match="ibv_import_mr failed: EFAULT"):
                await pd.import_memory_region(alone.rkey).open()


@software
@pytest.mark.parametrize("closes", [False, True])
async def test_threads_get_the_same_shared_memory_at_its_first_use(
    device: Device, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """The first thread is held while it makes the allocator; the other thread uses the domain, or closes it."""
    inside = threading.Event()
    made: list[object] = []

    def held(pd: handles.ProtectionDomain) -> object:
        made.append(area := shared_area(pd))
        inside.set()
        time.sleep(0.2)
        return area

    pd = await device.protection_domain().open()
    async with pd.share(KEY):
        pass
    monkeypatch.setattr("aioverbs._core.software.software.shared_area", held)
    first = asyncio.create_task(asyncio.to_thread(lambda: pd.shared_memory))
    assert await asyncio.to_thread(inside.wait, patience(20))
    if closes:
        await pd.aclose()
    else:
        assert pd.shared_memory is await first
        assert len(made) == 1
        await pd.aclose()
    with pytest.raises(OSError, match="is closed"):
        (await first).allocate(100, 1)


@software
async def test_missing_shared_memory(device: Device) -> None:
    async with device.protection_domain() as pd:
        with pytest.raises(VerbsError, match=r"EINVAL .*open share\(\) first"):
            pd.shared_memory  # noqa: B018
        async with pd.share(KEY):
            memory = pd.shared_memory
            with pytest.raises(OSError, match="no 1125899906842624 contiguous free bytes"):
                await pd.register(1 << 50, ACCESS, memory).open()
    with pytest.raises(OSError, match="is closed"):
        memory.allocate(100, 1)
    with pytest.raises(ClosedResourceError):
        pd.shared_memory  # noqa: B018


@software
async def test_invalid_device_names(device: Device, ends: Ends) -> None:
    async with device.protection_domain() as pd, pd.share(KEY) as shared:
        for name, error in (("mlx5_0", DeviceNotFoundError), ("soft0@no where", ValueError)):
            sending = asyncio.create_task(shared.send(ends[0]))
            with pytest.raises(error):
                await import_device(ends[1], shared.id, KEY, name=name).open()
            await sending


async def test_a_name_for_an_rdma_device(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    device = import_device(ends[1], ID, KEY, name="soft0")
    opening = asyncio.create_task(device.open())
    await answer(ends[0], stand_in.context, shared)
    with pytest.raises(ValueError, match="the peer shares mlx5_0: leave it out"):
        await opening


@pytest.mark.parametrize("kinds", ["", "c", "cf"], ids=lambda kinds: kinds or "none")
async def test_replies_of_a_software_device_with_a_wrong_number_of_descriptors(
    ends: Ends, stand_in: StandIn, shared: Share, kinds: str
) -> None:
    near, far = ends
    receiving = asyncio.create_task(receive(far, ID, KEY))
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    fds = [stand_in.dup_cmd_fd() if kind == "c" else shared.dup_file() for kind in kinds]
    attach(near, Reply.make(request, KEY, "soft0", 0).pack(), *fds)
    with pytest.raises(VerbsError, match=r"EPROTO .*descriptors"):
        await receiving


@needs(Capability.SHARED_DOMAINS)
async def test_a_file_that_is_not_a_domain(ends: Ends, shared: Share) -> None:
    near, far = ends
    device = import_device(far, ID, KEY)
    opening = asyncio.create_task(device.open())
    request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
    attach(near, Reply.make(request, KEY, "soft0", 0).pack(), shared.dup_file())
    await opening
    with pytest.raises(VerbsError, match="ibv_share_pd failed: EPROTO"):
        await device.shared_protection_domain(ID, KEY).open()
    await device.aclose()


@needs(Capability.SHARED_DOMAINS)
async def test_errors_of_the_software_device(device: Device, ends: Ends) -> None:
    async with device.protection_domain() as pd, pd.share(KEY) as shared:
        for shared_id, key, error, pattern in (
            (shared.id, KEY ^ 1, errno.EACCES, "the share key is wrong"),
            (shared.id ^ 1 << 20, KEY, errno.ENOENT, "nothing is shared under that id"),
            (shared.id ^ 1 << 40, KEY, errno.EXDEV, "and soft0 is another one"),
        ):
            with pytest.raises(VerbsError, match=pattern) as caught:
                await device.shared_protection_domain(shared_id, key).open()
            assert caught.value.errno == error
        for shared_id, key, what in (
            (1 << 96, KEY, "shared_id must fit in 96"),
            (-1, KEY, "shared_id"),
            (1, 1 << 64, "key"),
        ):
            with pytest.raises(ValueError, match=what):
                device.shared_protection_domain(shared_id, key)
            with pytest.raises(ValueError, match=what):
                import_device(ends[0], shared_id, key)


@pytest.mark.parametrize("busy", [False, True], ids=["", "busy"])
async def test_two_concurrent_opens_of_one_domain(
    stand_in: StandIn, shared: Share, ends: Ends, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Both run the exchange; one open succeeds, the other one fails and leaks nothing."""
    monkeypatch.setattr(ReceivedShare, "open_context", lambda self, name: SoftwareContext.open())
    device = import_device(ends[1], ID, KEY)
    before = descriptors_at_first()

    monkeypatch.setattr("aioverbs._verbs.imported_device.receive", two_at_once(ends, stand_in, shared, busy))
    done = await asyncio.gather(device.open(), device.open(), return_exceptions=True)
    assert device in done
    assert [str(each) for each in done if isinstance(each, ClosedResourceError)] == [
        f"{device._lifecycle!r} cannot be opened again: make a new one, or use it as it is, without `async with`"
    ]
    with pytest.raises(ClosedResourceError, match="cannot be opened again"):
        await device.open()
    await device.aclose()
    assert descriptors() == before


def two_at_once(
    ends: Ends, stand_in: StandIn, shared: Share, busy: bool
) -> Callable[..., Awaitable[ReceivedShare | ReceivedSoftwareShare]]:
    """Return a `receive` for two callers: they run one after the other on the socket, and return together.

    :param busy: spend the loop iteration's budget for opening, so that both callers continue in the next one.
    """
    both = asyncio.Barrier(2)
    turn = asyncio.Lock()

    async def receive_in_turn(*arguments: Any) -> ReceivedShare | ReceivedSoftwareShare:
        async with turn:
            _, received_share = await asyncio.gather(answer(ends[0], stand_in.context, shared), receive(*arguments))
        await both.wait()
        while busy and not spend(OPENING):
            pass
        return received_share

    return receive_in_turn


async def test_a_failed_import_leaks_nothing(ends: Ends, stand_in: StandIn, shared: Share) -> None:
    """The exchange succeeds, but the descriptor belongs to no RDMA device."""
    before = descriptors_at_first()
    device = import_device(ends[1], ID, KEY)
    opening = asyncio.create_task(device.open())
    await answer(ends[0], stand_in.context, shared)
    with pytest.raises((VerbsError, LibraryNotFoundError)):  # no device of this machine, or no libibverbs
        await opening
    assert descriptors() == before
