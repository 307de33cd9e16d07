"""A pytest plugin that skips the tests of what qemu-user does not do as a kernel does, each with its reason.

`nox -s aarch64` sets AIOVERBS_TEST_EMULATED; `tests/conftest.py` loads the plugin where that is set. The C programs ask
for the same things by themselves: see `tests/native/support_kernel.h`.
"""

import pytest

__all__ = ["NOT_EMULATED"]

NOT_EMULATED = {
    "tests/core/test_native_allocators.py::test_an_unsupported_huge_page_size": (
        "mmap gives huge pages of sizes that the kernel does not have"
    ),
    "tests/core/test_registered_memory.py::test_unmapped_memory_is_refused": (
        "madvise(MADV_POPULATE_READ) succeeds where nothing is mapped"
    ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = NOT_EMULATED.get(item.nodeid.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"under qemu-user {reason}"))
