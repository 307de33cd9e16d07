"""See tests/data_path/test_completion_queues.py: the same between two devices."""

from tests.data_path.test_completion_queues import (
    test_completions_and_wakeups_are_counted,
    test_spins_are_counted,
    test_what_is_in_it_stays_when_it_is_resized,
)

__all__ = [
    "test_completions_and_wakeups_are_counted",
    "test_spins_are_counted",
    "test_what_is_in_it_stays_when_it_is_resized",
]
