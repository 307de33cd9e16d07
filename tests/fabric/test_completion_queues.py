"""See tests/data_path/test_completion_queues.py: the same between two devices."""

from tests.data_path.test_completion_queues import (
    test_spins_are_counted,
    test_what_is_in_it_stays_when_it_is_resized,
    test_what_it_counts,
)

__all__ = [
    "test_spins_are_counted",
    "test_what_is_in_it_stays_when_it_is_resized",
    "test_what_it_counts",
]
