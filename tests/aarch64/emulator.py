"""A pytest plugin that skips the tests of kernel features that qemu-user lacks, each with its reason.

`nox -s aarch64` sets AIOVERBS_TEST_EMULATED, and `tests/conftest.py` then loads the plugin. The C programs detect the
same features themselves: see `tests/native/support_kernel.h`.
"""

import pytest

__all__ = ["NOT_EMULATED"]

NOT_EMULATED = {
    "tests/core/test_native_allocators.py::test_an_unsupported_huge_page_size": (
        "mmap accepts sizes of huge pages that the kernel does not have"
    ),
    "tests/core/test_registered_memory.py::test_unmapped_memory_is_refused": (
        "madvise(MADV_POPULATE_READ) succeeds where nothing is mapped"
    ),
    "tests/data_path/test_adaptive_polling.py::test_other_tasks_run_between_two_polls": (
        "one turn of the loop may take longer than a wait polls"
    ),
    "tests/data_path/test_adaptive_polling.py::test_a_task_spins_only_while_the_loop_has_nothing_else_to_do": (
        "one poll and its dispatch may take longer than a task spins"
    ),
    "tests/data_path/test_adaptive_polling.py::test_loops_that_always_poll_take_the_processors": (
        "a thread may not poll again within the time for which it counts as polling"
    ),
    "tests/sharing/test_process_exit.py::test_memory_of_a_dead_process_is_freed": (
        "madvise(MADV_REMOVE) succeeds and frees no pages"
    ),
    "tests/sharing/test_process_exit.py::test_a_child_of_a_dead_process_does_not_count_as_alive": (
        "madvise(MADV_DONTFORK) keeps no mapping from a child, and the mapping of a file holds its locks"
    ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip those tests.

    :raises pytest.UsageError: a whole file was collected that has no test of a name in the table.
    """
    collected = {item.nodeid.partition("[")[0] for item in items}
    for item in items:
        reason = NOT_EMULATED.get(item.nodeid.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"under qemu-user {reason}"))
    if not any("::" in each for each in config.args):
        files = {name.partition("::")[0] for name in collected}
        gone = [name for name in NOT_EMULATED.keys() - collected if name.partition("::")[0] in files]
        if gone:
            raise pytest.UsageError(f"{__file__} names tests that do not exist: {', '.join(sorted(gone))}")
