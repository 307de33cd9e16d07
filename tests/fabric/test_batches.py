"""See tests/data_path/test_batches.py: the same between two devices."""

from tests.data_path.test_batches import (
    test_a_batch_in_error_state,
    test_a_failure_in_the_middle,
    test_all_kinds_in_one,
    test_closed_while_it_is_under_way,
    test_datagrams,
    test_one_doorbell_and_one_completion,
    test_the_last_one_fails,
    test_what_waits_behind_a_failure_is_flushed,
)

__all__ = [
    "test_a_batch_in_error_state",
    "test_a_failure_in_the_middle",
    "test_all_kinds_in_one",
    "test_closed_while_it_is_under_way",
    "test_datagrams",
    "test_one_doorbell_and_one_completion",
    "test_the_last_one_fails",
    "test_what_waits_behind_a_failure_is_flushed",
]
