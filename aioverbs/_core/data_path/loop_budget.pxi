# Part of work.pyx: the turn of the loop, for awaits above the queues that are done at once.

def spend(uint32_t units):
    """Count what was done without going round the loop: the units of `turn.h`, a quarter of a microsecond each.

    :returns: 0, or the number of the turn where others are to run now: see `aioverbs._lifecycle.turns`.
    """
    return turn_spend(units)


def went_round(uint64_t number):
    """The loop has gone round since the turn of that number."""
    turn_advance(number)
