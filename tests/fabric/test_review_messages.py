"""See tests/data_path/test_review_messages.py: the same between two devices."""

from tests.data_path.test_review_messages import (
    test_messages_begin_again_after_a_reset,
    test_messages_end_where_none_is_posted,
)

__all__ = [
    "test_messages_begin_again_after_a_reset",
    "test_messages_end_where_none_is_posted",
]
