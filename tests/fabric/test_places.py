"""See tests/data_path/test_places.py: the same between two devices."""

from tests.data_path.test_places import (
    test_a_batch_that_needs_many_places_gets_them,
    test_closing_ends_what_waits,
    test_first_come_first_served,
    test_posted_in_the_order_of_the_calls,
    test_receives_wait_for_places_too,
    test_what_is_awaited_while_it_waits_is_kept,
    test_who_drops_what_waits_withdraws_it,
    test_who_drops_what_was_posted_does_not,
    test_who_is_cancelled_while_it_waits_withdraws_it,
)

__all__ = [
    "test_a_batch_that_needs_many_places_gets_them",
    "test_closing_ends_what_waits",
    "test_first_come_first_served",
    "test_posted_in_the_order_of_the_calls",
    "test_receives_wait_for_places_too",
    "test_what_is_awaited_while_it_waits_is_kept",
    "test_who_drops_what_waits_withdraws_it",
    "test_who_drops_what_was_posted_does_not",
    "test_who_is_cancelled_while_it_waits_withdraws_it",
]
