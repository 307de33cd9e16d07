"""See tests/data_path/test_refused_in_the_middle.py: the same between two devices."""

from tests.data_path.test_refused_in_the_middle import (
    test_a_batch_ends_with_what_was_taken_and_what_was_not,
    test_a_chain_ends_with_what_was_taken_and_what_was_not,
    test_those_after_one_that_is_refused_are_posted,
    test_what_cannot_be_reset_ends_when_it_is_closed,
)

__all__ = [
    "test_a_batch_ends_with_what_was_taken_and_what_was_not",
    "test_a_chain_ends_with_what_was_taken_and_what_was_not",
    "test_those_after_one_that_is_refused_are_posted",
    "test_what_cannot_be_reset_ends_when_it_is_closed",
]
