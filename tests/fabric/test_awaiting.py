"""Tests of tests/data_path/test_awaiting.py, between two devices."""

from tests.data_path.test_awaiting import (
    test_an_operation_is_driven_by_hand,
    test_anyio_functions_accept_operations,
    test_asking_for_the_result_does_not_spin,
    test_asyncio_functions_accept_operations,
    test_other_tasks_run_beside_awaits_that_complete_at_once,
    test_polling_done_completes_an_operation,
)

__all__ = [
    "test_an_operation_is_driven_by_hand",
    "test_anyio_functions_accept_operations",
    "test_asking_for_the_result_does_not_spin",
    "test_asyncio_functions_accept_operations",
    "test_other_tasks_run_beside_awaits_that_complete_at_once",
    "test_polling_done_completes_an_operation",
]
