"""The documented domains on a live kernel context: ibv_alloc_td, ibv_alloc_parent_domain, ibv_open_xrcd.

Kernel soft-RoCE lacks them. A test-only library (`shim.h`) puts ops that follow the documentation into the context's
own ``struct verbs_context``, so that calling convention, lifetime and order are tested in the structures that
libibverbs created.
"""

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioverbs import BusyResourceError, SendFlags, SendOpcode, VerbsError
from aioverbs._core.handles import handles, parent_domain
from tests.raw_verbs import post_send
from tests.rdma.seam import Pair, opened, rdma_devices
from tests.rdma.shim import CONTROL_PAGE, Shim

pytestmark = pytest.mark.rdma


@pytest.fixture
def context() -> Iterator[handles.Context]:
    with opened(rdma_devices()[0]) as context:
        yield context


@pytest.fixture
def shim(context: handles.Context) -> Iterator[Shim]:
    shim = Shim(context)
    yield shim
    for handle in reversed(handles.open_handles()):
        if handle is not context:
            handle.destroy()
    shim.uninstall()


class Pages:
    """An allocator of whole pages that records requests."""

    def __init__(self) -> None:
        self.pages: dict[int, mmap.mmap] = {}
        self.asked: list[tuple[int, int, int]] = []
        self.freed: list[int] = []

    def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> int:
        """Return new shared anonymous memory, which is zeroed and not copied by a fork."""
        self.asked.append((size, alignment, resource_type))
        pages = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.pages[address] = pages
        return address

    def free(self, address: int, resource_type: int, *of: object) -> None:
        """Unmap the pages; a second call is a KeyError."""
        del self.pages[address]
        self.freed.append(resource_type)


def transfer(pair: Pair) -> None:
    """Check that a pair transfers data."""
    pair.memory[0][:8] = b"proof..."
    post_send(
        pair.qps[0],
        SendOpcode.RDMA_WRITE,
        [pair.sge(0, 0, 8)],
        flags=SendFlags.SIGNALED,
        remote_addr=pair.regions[1].address,
        rkey=pair.regions[1].rkey,
    )
    pair.succeed(0)
    assert pair.memory[1][:8] == b"proof..."


def test_thread_domain(context: handles.Context, shim: Shim) -> None:
    first, second = parent_domain.ThreadDomain(context), parent_domain.ThreadDomain(context)
    assert shim.counts()["tds"] == 2
    first.destroy()
    assert shim.counts()["tds"] == 1
    second.destroy()


def test_a_parent_domain_replaces_its_base(context: handles.Context, shim: Shim) -> None:
    pd, td = handles.ProtectionDomain(context), parent_domain.ThreadDomain(context)
    parent = parent_domain.ParentDomain(pd, td)
    pair = Pair(parent, pd)  # one side on the parent domain, the other on its base: one protection domain
    transfer(pair)
    pair.destroy()


def test_completion_queues_on_a_parent_domain(context: handles.Context, shim: Shim) -> None:
    parent = parent_domain.ParentDomain(handles.ProtectionDomain(context), parent_domain.ThreadDomain(context))
    transfer(Pair(parent, parent, extended=True, parent_domain_queues=True))


def test_destroying_a_parent_domain_leaves_the_base_s_kernel_object(context: handles.Context, shim: Shim) -> None:
    pd = handles.ProtectionDomain(context)
    parent = parent_domain.ParentDomain(pd)
    parent.destroy()
    assert shim.counts()["parents"] == 0
    transfer(Pair(pd, pd))


def test_parents_with_children_are_refused(context: handles.Context, shim: Shim) -> None:
    pd, td = handles.ProtectionDomain(context), parent_domain.ThreadDomain(context)
    parent = parent_domain.ParentDomain(pd, td)
    region = handles.MemoryRegion(parent, bytearray(64))
    for held in (td, pd, parent, context):
        with pytest.raises(BusyResourceError):
            held.destroy()
    region.destroy()
    parent.destroy()
    td.destroy()


ORDERS = list(itertools.permutations(("parent", "td", "pd")))


@pytest.mark.rdma_all
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order_of_destruction(context: handles.Context, shim: Shim, order: tuple[str, ...]) -> None:
    made: dict[str, handles.Handle] = {}
    pd, td = handles.ProtectionDomain(context), parent_domain.ThreadDomain(context)
    made.update(pd=pd, td=td, parent=parent_domain.ParentDomain(pd, td))
    remaining = list(order)
    for _ in range(len(order)):
        for name in list(remaining):
            if "parent" in remaining and name != "parent":
                with pytest.raises(BusyResourceError):
                    made[name].destroy()
            else:
                made[name].destroy()
                remaining.remove(name)
    assert remaining == []


def test_a_parent_of_a_parent_is_made_over_the_base(context: handles.Context, shim: Shim) -> None:
    pd = handles.ProtectionDomain(context)
    parent = parent_domain.ParentDomain(pd)
    assert parent_domain.ParentDomain(parent).base is pd
    parent.destroy()


def test_an_allocator_is_called_as_documented(context: handles.Context, shim: Shim) -> None:
    pages = Pages()
    pd = handles.ProtectionDomain(context)
    parent = parent_domain.ParentDomain(pd, None, pages)
    assert pages.asked == [(4096, 4096, CONTROL_PAGE)]
    assert parent.held == len(pages.pages) == 1
    parent.destroy()
    assert pages.freed == [CONTROL_PAGE]
    assert pages.pages == {}
    assert (shim.counts()["alloc_calls"], shim.counts()["free_calls"]) == (1, 1)


def test_an_allocator_may_defer_to_the_provider(context: handles.Context, shim: Shim) -> None:
    class Default:
        freed = 0

        def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> object:
            return parent_domain.USE_DEFAULT

        def free(self, address: int, resource_type: int, *of: object) -> None:
            self.freed += 1

    pages = Default()
    parent = parent_domain.ParentDomain(handles.ProtectionDomain(context), None, pages)
    parent.destroy()
    assert pages.freed == 0


def test_an_allocator_that_raises(context: handles.Context, shim: Shim) -> None:
    class Failing(Pages):
        def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> int:
            raise MemoryError("no pages left")

    pd = handles.ProtectionDomain(context)
    with pytest.raises(VerbsError, match="ibv_alloc_parent_domain") as caught:
        parent_domain.ParentDomain(pd, None, Failing())
    assert caught.value.errno == errno.ENOMEM
    assert isinstance(caught.value.__cause__, MemoryError)
    pd.destroy()


class TestXrcDomain:
    """``ibv_open_xrcd``: fd, oflag, the inode, the last close."""

    @pytest.fixture
    def fd(self, tmp_path: Path) -> Iterator[int]:
        fd = os.open(tmp_path / "domain", os.O_CREAT | os.O_RDWR)
        yield fd
        os.close(fd)

    def test_without_an_inode(self, context: handles.Context, shim: Shim) -> None:
        first, second = (parent_domain.XrcDomain(context, -1, os.O_CREAT) for _ in range(2))
        assert shim.counts()["xrc_domains"] == 2
        first.destroy()
        second.destroy()

    def test_one_domain_for_an_inode(self, context: handles.Context, shim: Shim, fd: int) -> None:
        with pytest.raises(VerbsError, match="ibv_open_xrcd"):
            parent_domain.XrcDomain(context, fd, 0)  # the domain does not exist, and O_CREAT is not set
        first = parent_domain.XrcDomain(context, fd, os.O_CREAT)
        again = parent_domain.XrcDomain(context, fd, 0)
        same = parent_domain.XrcDomain(context, fd, os.O_CREAT)  # O_CREAT has no effect: the domain exists
        counts = shim.counts()
        assert (counts["xrcds"], counts["xrc_domains"]) == (3, 1)
        with pytest.raises(VerbsError) as caught:
            parent_domain.XrcDomain(context, fd, os.O_CREAT | os.O_EXCL)
        assert caught.value.errno == errno.EINVAL  # as the kernel does
        first.destroy()
        again.destroy()
        assert shim.counts()["xrc_domains"] == 1
        same.destroy()  # the last reference destroys the domain
        assert shim.counts()["xrc_domains"] == 0

    def test_closing_fails_while_associated(self, context: handles.Context, shim: Shim) -> None:
        xrcd = parent_domain.XrcDomain(context, -1, os.O_CREAT)
        shim.associate(xrcd, 1)
        with pytest.raises(BusyResourceError, match="is associated with it"):
            xrcd.destroy()
        assert not xrcd.closed
        shim.associate(xrcd, -1)
        xrcd.destroy()
