"""The repr of handles, as error messages show them."""

import re

from aioverbs._core.handles import parent_domain
from aioverbs.testing import destroy_all
from tests.core.contexts import open_context
from tests.core.family import make_all

OPEN = {
    "context": r"<Context of soft0>",
    "pd": r"<ProtectionDomain \d+ of soft0>",
    "td": r"<ThreadDomain of soft0>",
    "domain": r"<ParentDomain \d+ of soft0>",
    "region": r"<MemoryRegion lkey 0x[0-9a-f]+, 64 bytes of soft0>",
    "channel": r"<CompletionChannel fd \d+ of soft0>",
    "queue": r"<CompletionQueue of soft0>",
    "window": r"<MemoryWindow of type 1 of soft0>",
    "ah": r"<AddressHandle to 00000000000000000000ffff7f[0-9a-f]{6} of soft0>",
    "xrc domain": r"<XrcDomain of soft0>",
    "srq": r"<SharedReceiveQueue of soft0>",
    "xrc srq": r"<SharedReceiveQueue of soft0>",
    "qp": r"<QueuePair \d+ of soft0>",
}


def test_repr_of_handles() -> None:
    family = make_all(open_context("inline"))
    for name, pattern in OPEN.items():
        assert re.fullmatch(pattern, repr(family[name]))
    before = {name: repr(family[name]) for name in OPEN}
    destroy_all(family.values())
    assert {name: repr(family[name]) for name in OPEN} == {
        name: text.replace(">", " (closed)>") for name, text in before.items()
    }


def test_repr_of_use_default() -> None:
    assert repr(parent_domain.USE_DEFAULT) == "USE_DEFAULT"
