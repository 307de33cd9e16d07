"""Tests of tests/data_path/test_completion_queues.py, between two devices."""

from tests.data_path.test_completion_queues import (
    test_completions_and_wakeups_are_counted,
    test_resizing_keeps_completions,
    test_spins_are_counted,
)

__all__ = [
    "test_completions_and_wakeups_are_counted",
    "test_resizing_keeps_completions",
    "test_spins_are_counted",
]
