"""See tests/data_path/test_failures.py: the same between two devices."""

from tests.data_path.test_failures import (
    test_a_move_to_error_flushes_all,
    test_a_queue_pair_that_breaks_by_itself_flushes_its_requests,
    test_a_receive_fails_and_breaks_both_ends,
    test_a_receive_that_comes_after_the_failure_is_flushed,
    test_a_receive_that_is_too_small_breaks_both,
    test_a_send_queue_stops_and_goes_on,
    test_every_status_is_told,
    test_memory_that_is_deregistered_by_its_handle_fails_the_request,
    test_misuse_fails_one_request_and_flushes_those_behind_it,
)

__all__ = [
    "test_a_move_to_error_flushes_all",
    "test_a_queue_pair_that_breaks_by_itself_flushes_its_requests",
    "test_a_receive_fails_and_breaks_both_ends",
    "test_a_receive_that_comes_after_the_failure_is_flushed",
    "test_a_receive_that_is_too_small_breaks_both",
    "test_a_send_queue_stops_and_goes_on",
    "test_every_status_is_told",
    "test_memory_that_is_deregistered_by_its_handle_fails_the_request",
    "test_misuse_fails_one_request_and_flushes_those_behind_it",
]
