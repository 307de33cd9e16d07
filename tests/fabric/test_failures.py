"""See tests/data_path/test_failures.py: the same between two devices."""

from tests.data_path.test_failures import (
    test_a_queue_pair_that_breaks_by_itself,
    test_a_receive_that_comes_after_the_failure,
    test_a_receive_that_is_too_small_breaks_both,
    test_a_send_queue_stops_and_goes_on,
    test_a_window_that_is_granted_too_much,
    test_every_status,
    test_memory_that_goes_behind_its_back,
    test_misuse,
    test_moved_to_error_by_hand,
    test_reads_that_were_not_agreed_on,
    test_receives_fail,
)

__all__ = [
    "test_a_queue_pair_that_breaks_by_itself",
    "test_a_receive_that_comes_after_the_failure",
    "test_a_receive_that_is_too_small_breaks_both",
    "test_a_send_queue_stops_and_goes_on",
    "test_a_window_that_is_granted_too_much",
    "test_every_status",
    "test_memory_that_goes_behind_its_back",
    "test_misuse",
    "test_moved_to_error_by_hand",
    "test_reads_that_were_not_agreed_on",
    "test_receives_fail",
]
