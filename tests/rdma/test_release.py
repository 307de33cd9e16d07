"""The rdma-core that the tests use: the installed one, or that of an unpacked release."""

import os
from pathlib import Path

import pytest

from aioverbs._core.handles import rdma_cm
from tests.rdma.seam import opened, rdma_devices

pytestmark = pytest.mark.rdma

ROOT = Path(os.environ.get("AIOVERBS_RDMA_RELEASE", "/"))


def mapped(start: str) -> Path:
    """Return the only library of this process whose name starts with `start`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {path for path in (Path(line.split()[-1]) for line in lines) if path.name.startswith(start)}
    return path


def test_libraries_belong_to_the_release() -> None:
    rdma_cm.load_librdmacm()
    name = rdma_devices()[0]
    with opened(name):
        libraries = [mapped(f"{each}.so.") for each in ("libibverbs", "librdmacm")]
        assert all(path.is_relative_to(ROOT) for path in libraries)
        # Both are of one release; so is the provider, which is mounted at the installed one's path.
        assert len({path.name.rpartition(".so.")[2].split(".", 2)[2] for path in libraries}) == 1
        if name.startswith("rxe"):
            provider = mapped("librxe-")
            assert provider.samefile(libraries[0].parent / "libibverbs" / provider.name)
