"""Texts of errors: the cause, and the remedy."""

import errno

import pytest

from aioverbs import VerbsError, WcStatus, WorkCompletionError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs.types import AccessFlags


def test_registration_without_permission_to_lock_memory() -> None:
    context = software.Context.open()
    try:
        pd = handles.ProtectionDomain(context)
        context.faults.fail("reg_mr", errno.EPERM)
        with pytest.raises(VerbsError, match=r"ibv_reg_mr failed: EPERM .*raise `ulimit -l`"):
            handles.MemoryRegion(pd, bytearray(64), AccessFlags.LOCAL_WRITE)
        pd.destroy()
    finally:
        context.destroy()


def test_verbs_that_lock_memory_name_its_limit() -> None:
    for verb in ("ibv_reg_mr", "ibv_create_cq", "ibv_create_qp", "ibv_create_srq", "ibv_resize_cq"):
        text = str(VerbsError(verb, errno.EPERM))
        assert "`ulimit -l`" in text
        assert "privilege" not in text


def test_other_verbs_that_are_not_permitted_need_a_privilege() -> None:
    assert "privilege" in str(VerbsError("ibv_modify_qp", errno.EPERM))


def test_a_request_that_the_queue_pair_does_not_carry_out_may_have_no_link() -> None:
    text = str(WorkCompletionError(WcStatus.LOC_QP_OP_ERR, None, 0, 1))
    assert "link is up" in text
    assert "opcode, flags and scatter/gather entries" in text
