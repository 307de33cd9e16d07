"""Tests of tests/data_path/test_batches.py, between two devices."""

from tests.data_path.test_batches import (
    test_a_batch_accepts_all_kinds_of_requests,
    test_a_batch_has_one_doorbell_and_one_completion,
    test_a_batch_is_flushed_by_closing,
    test_a_batch_is_flushed_by_the_error_state,
    test_a_batch_of_datagrams,
    test_a_batch_reports_that_its_last_request_failed,
    test_a_batch_reports_which_request_failed,
    test_a_batch_that_waits_behind_a_failure_is_flushed,
)

__all__ = [
    "test_a_batch_accepts_all_kinds_of_requests",
    "test_a_batch_has_one_doorbell_and_one_completion",
    "test_a_batch_is_flushed_by_closing",
    "test_a_batch_is_flushed_by_the_error_state",
    "test_a_batch_of_datagrams",
    "test_a_batch_reports_that_its_last_request_failed",
    "test_a_batch_reports_which_request_failed",
    "test_a_batch_that_waits_behind_a_failure_is_flushed",
]
