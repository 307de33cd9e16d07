"""A closed handle raises for everything but its identity."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import ClosedResourceError, QpState, VerbsError
from aioverbs._core.handles import handles
from aioverbs.testing import destroy_all
from tests.core.contexts import open_context
from tests.core.family import make_all

# Names that stay available on a closed handle: its identity, and methods that are always allowed.
IDENTITY = {
    "adopt",
    "affinity",
    "allocator",
    "async_fd",
    "base",
    "capabilities",
    "channel",
    "closed",
    "context",
    "cq",
    "destroy",
    "held",
    "import_device",
    "import_pd",
    "lease",
    "mw_type",
    "name",
    "num_comp_vectors",
    "open",
    "open_device",
    "parent_domain",
    "pd",
    "pd_context",
    "qp_type",
    "state",
    "recv_cq",
    "send_cq",
    "software",
    "srq",
    "td",
    "xrc_domain",
}

# Names of these that create another handle.
MAKERS = {"adopt", "import_device", "import_pd", "open", "open_device"}

MODIFICATIONS: dict[type, tuple[int, ...]] = {handles.QueuePair: (QpState.INIT,), handles.CompletionQueue: (0, 0)}


# Calls of methods that need arguments.
CALLS: dict[str, Callable[[Any], object]] = {
    "modify": lambda handle: handle.modify(*MODIFICATIONS.get(type(handle), ())),
    "begin_modify": lambda qp: qp.begin_modify(QpState.INIT).end(),
    "query_gid_table": lambda context: context.query_gid_table(1),
    "resize": lambda cq: cq.resize(1),
    "set_delay": lambda context: context.set_delay(0),
    "table_slot": lambda context: context.table_slot("alloc_pd"),
}


def access(handle: handles.Handle, name: str) -> object:
    """Read a property, or call a method."""
    if name in CALLS:
        return CALLS[name](handle)
    value = getattr(handle, name)
    return value() if callable(value) else value


@pytest.fixture
def family() -> list[handles.Handle]:
    """One of each handle, open, on a context of their own."""
    return list(make_all(open_context("thread")).values())


def public(handle: handles.Handle) -> list[str]:
    return [name for name in dir(handle) if not name.startswith("_")]


def test_everything_but_identity_raises(family: list[handles.Handle]) -> None:
    destroy_all(family)
    accesses = 0
    for handle in family:
        for name in set(public(handle)) - IDENTITY:
            with pytest.raises(ClosedResourceError, match="is closed"):
                print("answered:", handle, name, access(handle, name))
            accesses += 1
    assert accesses > 40


def test_identity_stays(family: list[handles.Handle]) -> None:
    def identity() -> list[object]:
        return [
            getattr(handle, name)
            for handle in family
            for name in public(handle)
            if name in IDENTITY - {"closed", "destroy", *MAKERS}
        ]

    before = identity()
    destroy_all(family)
    assert identity() == before
    assert all(handle.closed for handle in family)


def test_open_handles_do_not_raise_closed_errors(family: list[handles.Handle]) -> None:
    """Open handles may raise other errors, but not this one: otherwise the first test would prove nothing."""
    for handle in family:
        for name in set(public(handle)) - IDENTITY:
            with contextlib.suppress(VerbsError, ValueError):
                access(handle, name)
    destroy_all(family)
