"""PURE: default timeouts and retry counts of connected queue pairs."""

from aioverbs._verbs.qp_state_machine import QpAttrs

__all__ = ["RETRIES"]

# A request that is not acknowledged is sent again after 4.096 us * 2**14 = 67 ms, and seven times in all, so that a
# dead peer is detected after half a second (devices may take up to four times that). retry_cnt is 6, because 7 means
# infinite retries on soft-RoCE.  A request that finds no posted receive is told to wait for the time of the
# *receiver's* min_rnr_timer. Its values are codes: 0 is the longest time, 655 ms, for which one missing receive stalls
# the connection; 1 is 10 us, with which all seven attempts are over in less than one iteration of a Python event loop.
# 18 is 5.12 ms: with six retries the peer's loop may stall for 30 ms, as in a garbage collection, before the connection
# breaks, and little time is lost if the receive is posted a little late. rnr_retry is 6, because 7 means infinite
# retries: an await on a peer that never posts a receive would never end.
RETRIES = QpAttrs(timeout=14, retry_cnt=6, min_rnr_timer=18, rnr_retry=6)
