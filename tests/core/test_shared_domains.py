"""Protection domains that several contexts share: a number, a key, an instance for each."""

import errno

import pytest

from aioverbs import BusyResourceError, ClosedResourceError, SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import connect, make_end, succeed, wait_for
from tests.raw_verbs import post_send

KEY = 0xFEDCBA9876543210


def test_regions_of_one_instance_serve_queue_pairs_of_another(context: software.Context) -> None:
    with opened("engine") as other:
        pd = handles.ProtectionDomain(context)
        share = software.share(pd, KEY)
        instance = software.open_shared(other, share, KEY)
        assert instance.context is other
        assert type(instance) is handles.ProtectionDomain
        near, far = make_end(pd), make_end(instance)
        connect(near.qp, far.qp)
        near.memory[:6] = b"shared"
        # The peer's context has the queue pair, this one the memory.
        mine = make_end(pd)
        post_send(
            near.qp,
            SendOpcode.RDMA_WRITE,
            [near.sge(0, 6)],
            remote_addr=mine.region.address,
            rkey=mine.region.rkey,
            flags=SendFlags.SIGNALED,
        )
        succeed(near.cq)
        assert mine.memory[:6] == b"shared"
        # And a local key of the other instance.
        post_send(
            far.qp,
            SendOpcode.RDMA_WRITE,
            [near.sge(0, 6)],
            remote_addr=far.region.address,
            rkey=far.region.rkey,
            flags=SendFlags.SIGNALED,
        )
        succeed(far.cq)
        assert far.memory[:6] == b"shared"


def test_a_domain_of_its_own_is_still_closed_to_others(context: software.Context) -> None:
    pd = handles.ProtectionDomain(context)
    software.share(pd, KEY)
    near, far = make_end(pd), make_end(pd)
    stranger = make_end(handles.ProtectionDomain(context))
    connect(near.qp, far.qp)
    post_send(
        near.qp, SendOpcode.RDMA_WRITE, [near.sge(0, 6)], remote_addr=stranger.region.address, rkey=stranger.region.rkey
    )
    assert wait_for(near.cq)[0].status is WcStatus.REM_ACCESS_ERR


def test_what_is_not_given_out(context: software.Context) -> None:
    pd = handles.ProtectionDomain(context)
    share = software.share(pd, KEY)
    before = context.counts()
    for number, key, error in ((share, KEY ^ 1, errno.EACCES), (share ^ 0x5555, KEY, errno.ENOENT)):
        with pytest.raises(VerbsError, match="ibv_share_pd failed") as caught:
            software.open_shared(context, number, key)
        assert caught.value.errno == error
    with pytest.raises(VerbsError, match="ibv_alloc_shpd failed: EEXIST"):
        software.share(pd, KEY)
    with pytest.raises(VerbsError, match="ibv_alloc_shpd failed: EEXIST"):
        software.share(parent_domain.ParentDomain(pd), KEY)
    with pytest.raises(OverflowError):
        software.share(handles.ProtectionDomain(context), 1 << 64)
    with pytest.raises(TypeError, match="NoneType"):
        software.open_shared(None, share, KEY)  # type: ignore[arg-type]
    assert context.counts()["mrs"] == before["mrs"]


def test_the_domain_goes_with_its_last_instance(context: software.Context) -> None:
    first = handles.ProtectionDomain(context)
    share = software.share(first, KEY)
    second = software.open_shared(context, share, KEY)
    first.destroy()
    third = software.open_shared(context, share, KEY)
    second.destroy()
    third.destroy()
    with pytest.raises(VerbsError, match="ENOENT"):
        software.open_shared(context, share, KEY)


def test_an_instance_is_a_handle_as_any(context: software.Context) -> None:
    share = software.share(handles.ProtectionDomain(context), KEY)
    instance = software.open_shared(context, share, KEY)
    assert instance in handles.open_handles()
    domain = parent_domain.ParentDomain(instance)
    with pytest.raises(BusyResourceError):
        instance.destroy()
    domain.destroy()
    instance.destroy()
    with pytest.raises(ClosedResourceError):
        software.share(instance, KEY)
    with opened("inline") as closed:
        pass
    with pytest.raises(ClosedResourceError):
        software.open_shared(closed, share, KEY)
