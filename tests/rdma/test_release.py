"""The rdma-core and pyverbs that the tests use: the installed ones, or those of an unpacked release."""

import importlib
import os
from pathlib import Path

import pytest

from aioverbs._core.handles import pyverbs_bridge
from tests.rdma.seam import opened, rdma_devices

pytestmark = pytest.mark.rdma

ROOT = Path(os.environ.get("AIOVERBS_RDMA_RELEASE", "/"))


def mapped(start: str) -> Path:
    """Return the only library of this process whose name starts with `start`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {path for path in (Path(line.split()[-1]) for line in lines) if path.name.startswith(start)}
    return path


def test_libraries_belong_to_the_release() -> None:
    module = importlib.import_module("pyverbs.cmid")
    name = rdma_devices()[0]
    with opened(name):
        libraries = [mapped(f"{each}.so.") for each in ("libibverbs", "librdmacm")]
        assert all(path.is_relative_to(ROOT) for path in libraries)
        # Both are of one release; so is the provider, which is mounted at the installed one's path.
        assert len({path.name.rpartition(".so.")[2].split(".", 2)[2] for path in libraries}) == 1
        if name.startswith("rxe"):
            provider = mapped("librxe-")
            assert provider.samefile(libraries[0].parent / "libibverbs" / provider.name)
    assert Path(module.__file__ or "").resolve().is_relative_to(ROOT)


def test_pyverbs_structures_have_the_expected_layout() -> None:
    """The structure behind the pointer agrees with the attributes of the object; otherwise these raise."""
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    with Context(name=rdma_devices()[0]) as context, PD(context) as pd, MR(pd, 64, 1) as mr:
        for capsule in (
            pyverbs_bridge.context_capsule(context),
            pyverbs_bridge.pd_capsule(pd),
            pyverbs_bridge.mr_capsule(mr),
        ):
            assert type(capsule).__name__ == "PyCapsule"
    with pytest.raises(ValueError, match="is closed"):
        pyverbs_bridge.context_capsule(context)
    with pytest.raises(ValueError, match="is closed"):
        pyverbs_bridge.pd_capsule(pd)
