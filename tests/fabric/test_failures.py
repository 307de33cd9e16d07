"""Tests of tests/data_path/test_failures.py, between two devices."""

from tests.data_path.test_failures import (
    test_a_move_to_error_flushes_all,
    test_a_queue_pair_that_breaks_by_itself_flushes_its_requests,
    test_a_receive_fails_and_breaks_both_ends,
    test_a_receive_posted_after_the_failure_is_flushed,
    test_a_receive_that_is_too_small_breaks_both,
    test_a_rejected_request_fails_and_later_ones_are_flushed,
    test_a_send_queue_stops_and_goes_on,
    test_every_status_is_reported,
    test_memory_deregistered_by_its_handle_fails_the_request,
)

__all__ = [
    "test_a_move_to_error_flushes_all",
    "test_a_queue_pair_that_breaks_by_itself_flushes_its_requests",
    "test_a_receive_fails_and_breaks_both_ends",
    "test_a_receive_posted_after_the_failure_is_flushed",
    "test_a_receive_that_is_too_small_breaks_both",
    "test_a_rejected_request_fails_and_later_ones_are_flushed",
    "test_a_send_queue_stops_and_goes_on",
    "test_every_status_is_reported",
    "test_memory_deregistered_by_its_handle_fails_the_request",
]
