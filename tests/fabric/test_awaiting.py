"""See tests/data_path/test_awaiting.py: the same between two devices."""

from tests.data_path.test_awaiting import (
    test_an_operation_is_done_by_looking_alone,
    test_an_operation_is_driven_by_hand,
    test_anyio_takes_it,
    test_asking_for_the_result_does_not_spin,
    test_asyncio_takes_it,
    test_others_run_while_awaits_are_done_at_once,
)

__all__ = [
    "test_an_operation_is_done_by_looking_alone",
    "test_an_operation_is_driven_by_hand",
    "test_anyio_takes_it",
    "test_asking_for_the_result_does_not_spin",
    "test_asyncio_takes_it",
    "test_others_run_while_awaits_are_done_at_once",
]
