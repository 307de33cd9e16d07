# Part of data_path.pyx: the budget of a loop's turn, for awaits in the layers above that are done at once.

def spend(uint32_t units):
    """Charge work that was done without returning to the event loop to the turn of the loop of this thread.

    :param units: amount of work in the units of ``loop_budget.h``, about a quarter of a microsecond each.
    :returns: 0, or the number of the turn where other tasks should run now: see `aioverbs._lifecycle.turns`.
    """
    return turn_spend(units)


def went_round(uint64_t number):
    """Note that the event loop has gone round since a turn, so that a new budget begins.

    :param number: number of the turn, as `spend` returned it.
    """
    turn_advance(number)
