"""Costs of the fast paths, counted without a clock: system calls, doorbells, turns of the loop, and allocations.

`scenes.py` performs each operation 128 times, on asyncio and on uvloop, and COSTS in `test_costs.py` has the totals. So
128 is once for each operation, and 2 is once in 64.

`system_calls.c` runs the scenes and counts their system calls by ptrace. Unlike a preloaded library, ptrace sees the
calls of every thread and library; unlike perf events and tracepoints, it needs no privilege; and it can run the threads
in turns, so that the numbers are the same each time. `allocations.c` is preloaded, and counts malloc and its relatives.

A failing test reports the counted numbers. If the change is intended, write the numbers into COSTS, with the reason in
the commit; if a number is larger, look for the cause first: `strace -f` and `ltrace` show where calls come from.
"""
