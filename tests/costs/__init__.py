"""What the fast paths cost, counted without a clock: system calls, doorbells, turns of the loop, and allocations.

`scenes.py` does each of them 128 times, on asyncio and on uvloop, and COSTS in `test_costs.py` is what that costs in
all. So 128 is once for each, and 2 is once in 64.

`system_calls.c` runs the scenes and counts their system calls by ptrace: all of them are seen, whichever thread or
library makes them, which a library that is loaded before the others does not see; it needs no privilege, where perf
events and tracepoints do; and the threads can be run in turns, so that the numbers are the same each time.
`allocations.c` is loaded before the others and counts malloc and its relatives.

A test that fails says what was counted. Where that is meant, write the numbers into COSTS, with the reason in the
commit; where one is larger, look for the cause first: `strace -f` and `ltrace` show where calls come from.
"""
