"""Protection domains that several contexts share: a number, a key, an instance for each.

The device's part is tested in C: tests/native/test_share.c.
"""

import pytest

from aioverbs import BusyResourceError, ClosedResourceError, SendFlags, SendOpcode, VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import connect, make_end, succeed
from tests.raw_verbs import post_send

KEY = 0xFEDCBA9876543210


def test_regions_of_one_instance_serve_queue_pairs_of_another(context: software.Context) -> None:
    with opened("thread") as other:
        pd = handles.ProtectionDomain(context)
        share = software.share(pd, KEY)
        instance = software.open_shared(other, share, KEY)
        assert instance.context is other
        assert type(instance) is handles.ProtectionDomain
        near, far = make_end(pd), make_end(instance)
        connect(near.qp, far.qp)
        near.memory[:6] = b"shared"
        # The queue pair belongs to the other context, the local memory to this one.
        post_send(
            far.qp,
            SendOpcode.RDMA_WRITE,
            [near.sge(0, 6)],
            remote_addr=near.region.address + 100,
            rkey=near.region.rkey,
            flags=SendFlags.SIGNALED,
        )
        succeed(far.cq)
        assert near.memory[100:106] == b"shared"


def test_a_wrong_key_is_refused(context: software.Context) -> None:
    pd = handles.ProtectionDomain(context)
    share = software.share(pd, KEY)
    before = context.counts()
    with pytest.raises(VerbsError, match="ibv_share_pd failed: EACCES"):
        software.open_shared(context, share, KEY ^ 1)
    with pytest.raises(VerbsError, match="ibv_alloc_shpd failed: EEXIST"):
        software.share(pd, KEY)
    with pytest.raises(OverflowError):
        software.share(handles.ProtectionDomain(context), 1 << 64)
    with pytest.raises(TypeError, match="NoneType"):
        software.open_shared(None, share, KEY)  # type: ignore[arg-type]
    assert context.counts()["mrs"] == before["mrs"]


def test_an_instance_behaves_like_any_handle(context: software.Context) -> None:
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
