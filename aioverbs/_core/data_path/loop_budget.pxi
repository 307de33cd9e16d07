# Part of data_path.pyx: the budget of a loop's turn, for awaits in the layers above that complete immediately.

def spend(uint32_t units):
    """Charge work to the current turn of this thread's event loop, because it was done without returning to the loop.

    :param units: amount of work in the units of ``loop_budget.h``, about a quarter of a microsecond each.
    :returns: 0; or the number of the turn if its budget is used up, so that other tasks should run now: see
        `aioverbs._lifecycle.turns`.
    """
    return turn_spend(units)


def went_round(uint64_t number):
    """Note that the event loop has begun a new turn since the given one, and begin a new budget. Do nothing if another
    call has already done so for the given turn.

    :param number: number of the turn, as `spend` returned it.
    """
    turn_advance(number)
