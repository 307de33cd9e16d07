"""Tests of tests/data_path/test_partial_posts.py, between two devices."""

from tests.data_path.test_partial_posts import (
    test_all_parts_of_a_partially_posted_batch_end,
    test_all_requests_of_a_partially_posted_chain_end,
    test_requests_after_a_refused_one_are_posted,
    test_requests_of_a_queue_pair_that_cannot_be_reset_end_on_close,
)

__all__ = [
    "test_all_parts_of_a_partially_posted_batch_end",
    "test_all_requests_of_a_partially_posted_chain_end",
    "test_requests_after_a_refused_one_are_posted",
    "test_requests_of_a_queue_pair_that_cannot_be_reset_end_on_close",
]
