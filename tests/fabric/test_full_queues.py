"""Tests of tests/data_path/test_full_queues.py, between two devices."""

from tests.data_path.test_full_queues import (
    test_a_batch_waits_for_all_of_its_slots,
    test_awaited_requests_are_posted_when_slots_are_free,
    test_cancelling_a_waiting_request_withdraws_it,
    test_closing_flushes_waiting_requests,
    test_dropping_a_posted_request_does_not_withdraw_it,
    test_dropping_a_waiting_request_withdraws_it,
    test_receives_wait_for_slots,
    test_requests_of_all_kinds_are_posted_in_the_order_of_the_calls,
    test_waiting_requests_are_posted_in_order,
)

__all__ = [
    "test_a_batch_waits_for_all_of_its_slots",
    "test_awaited_requests_are_posted_when_slots_are_free",
    "test_cancelling_a_waiting_request_withdraws_it",
    "test_closing_flushes_waiting_requests",
    "test_dropping_a_posted_request_does_not_withdraw_it",
    "test_dropping_a_waiting_request_withdraws_it",
    "test_receives_wait_for_slots",
    "test_requests_of_all_kinds_are_posted_in_the_order_of_the_calls",
    "test_waiting_requests_are_posted_in_order",
]
