"""See tests/data_path/test_messages.py: the same between two devices."""

from tests.data_path.test_messages import (
    test_a_failure_is_told_and_a_reset_begins_anew,
    test_ends_when_it_is_closed,
    test_in_their_order,
    test_one_at_a_time,
    test_what_cannot_be,
    test_what_is_forgotten_comes_back,
    test_what_is_kept_is_not_received_into,
    test_who_forgets_to_await_loses_nothing,
    test_who_is_cancelled_loses_nothing,
)

__all__ = [
    "test_a_failure_is_told_and_a_reset_begins_anew",
    "test_ends_when_it_is_closed",
    "test_in_their_order",
    "test_one_at_a_time",
    "test_what_cannot_be",
    "test_what_is_forgotten_comes_back",
    "test_what_is_kept_is_not_received_into",
    "test_who_forgets_to_await_loses_nothing",
    "test_who_is_cancelled_loses_nothing",
]
