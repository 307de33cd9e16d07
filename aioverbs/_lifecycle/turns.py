"""Turns of the event loop: awaits that are done at once leave others theirs."""

import asyncio

from aioverbs._core.data_path.data_path import spend, went_round

__all__ = ["LIGHT", "OPENING", "spend", "yield_to_loop"]

# What an await takes that does not go round the loop by itself, in the units that a turn has: see `_core/turn.h`.
LIGHT = 4
OPENING = 8


async def yield_to_loop(turn: int) -> None:
    """Let others run, where `spend` says that it is time. Whoever is cancelled here gives back what they have.

    Elsewhere than on an asyncio event loop nothing is done: others run there by other rules.

    :param turn: what `spend` returned.
    """
    if asyncio._get_running_loop() is None:
        return
    try:
        await asyncio.sleep(0)
    finally:
        went_round(turn)
