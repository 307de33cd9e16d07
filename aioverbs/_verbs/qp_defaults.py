"""PURE: how often, and after which time, queue pairs repeat what was not answered where nobody says otherwise."""

from aioverbs._verbs.qp_state_machine import QpAttrs

__all__ = ["RETRIES"]

# A request that is not answered is sent again after 4.096 us * 2**14 = 67 ms, seven times in all, so that a dead peer
# is known after half a second (devices may take up to four times that). retry_cnt ends at 6, because 7 is for ever on
# soft-RoCE.
#
# A request that finds no receive is told to wait for the time of the *receiver's* min_rnr_timer. The codes are a table:
# 0 is the longest, 655 ms, which makes one missing receive a stand-still; 1 is 10 us, and then seven tries are over in
# less than a Python loop's turn. 18 is 5.12 ms: with six repetitions the peer's loop may stall for 30 ms, as under a
# garbage collection, before the connection breaks, and where it was only late little time is lost. rnr_retry ends at 6,
# because 7 means for ever: an await on a peer that never posts a receive would never end.
RETRIES = QpAttrs(timeout=14, retry_cnt=6, min_rnr_timer=18, rnr_retry=6)
