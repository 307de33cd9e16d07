"""See tests/data_path/test_operations.py: the same between two devices."""

from tests.data_path.test_operations import (
    test_a_peer_invalidates,
    test_atomics,
    test_messages,
    test_no_windows_for_datagrams,
    test_remote_memory,
    test_what_a_type_has_not,
    test_windows,
    test_xrc_has_receives_in_shared_queues_only,
)

__all__ = [
    "test_a_peer_invalidates",
    "test_atomics",
    "test_messages",
    "test_no_windows_for_datagrams",
    "test_remote_memory",
    "test_what_a_type_has_not",
    "test_windows",
    "test_xrc_has_receives_in_shared_queues_only",
]
