"""See tests/data_path/test_messages.py: the same between two devices."""

from tests.data_path.test_messages import (
    test_a_failure_is_told_and_a_reset_begins_anew,
    test_messages_begin_again_after_a_reset,
    test_messages_come_in_their_order,
    test_messages_end_when_their_queue_pair_is_closed,
    test_messages_end_where_none_is_posted,
    test_what_is_forgotten_comes_back,
    test_what_is_kept_is_not_received_into,
    test_who_forgets_to_await_loses_nothing,
    test_who_is_cancelled_loses_nothing,
)

__all__ = [
    "test_a_failure_is_told_and_a_reset_begins_anew",
    "test_messages_begin_again_after_a_reset",
    "test_messages_come_in_their_order",
    "test_messages_end_when_their_queue_pair_is_closed",
    "test_messages_end_where_none_is_posted",
    "test_what_is_forgotten_comes_back",
    "test_what_is_kept_is_not_received_into",
    "test_who_forgets_to_await_loses_nothing",
    "test_who_is_cancelled_loses_nothing",
]
