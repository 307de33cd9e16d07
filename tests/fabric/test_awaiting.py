"""See tests/data_path/test_awaiting.py: the same between two devices."""

from tests.data_path.test_awaiting import (
    test_anyio_takes_it,
    test_asked_before_it_is_done,
    test_asyncio_takes_it,
    test_by_hand,
    test_done_by_looking_alone,
    test_others_run_while_awaits_are_done_at_once,
)

__all__ = [
    "test_anyio_takes_it",
    "test_asked_before_it_is_done",
    "test_asyncio_takes_it",
    "test_by_hand",
    "test_done_by_looking_alone",
    "test_others_run_while_awaits_are_done_at_once",
]
