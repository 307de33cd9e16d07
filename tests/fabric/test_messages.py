"""Tests of tests/data_path/test_messages.py, between two devices."""

from tests.data_path.test_messages import (
    test_a_failure_is_reported_and_a_reset_starts_over,
    test_buffers_of_dropped_messages_are_posted_again,
    test_buffers_of_held_messages_are_not_reused,
    test_cancelled_waiters_lose_no_message,
    test_dropped_requests_for_messages_lose_none,
    test_messages_arrive_in_order,
    test_messages_begin_again_after_a_reset,
    test_messages_end_on_close_with_nothing_posted,
    test_messages_end_when_their_queue_pair_is_closed,
)

__all__ = [
    "test_a_failure_is_reported_and_a_reset_starts_over",
    "test_buffers_of_dropped_messages_are_posted_again",
    "test_buffers_of_held_messages_are_not_reused",
    "test_cancelled_waiters_lose_no_message",
    "test_dropped_requests_for_messages_lose_none",
    "test_messages_arrive_in_order",
    "test_messages_begin_again_after_a_reset",
    "test_messages_end_on_close_with_nothing_posted",
    "test_messages_end_when_their_queue_pair_is_closed",
]
