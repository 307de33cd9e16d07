"""PURE: when to try again."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from aioverbs._exports import publish

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """How long to wait before each further attempt: twice as long each time, and at random, so that many who lost the
    same peer do not all come back at once.

    :param first_s: the longest wait before the second attempt, in seconds.
    :param longest_s: the longest of all.
    :param factor: how many times as long each is as the one before.
    :param jitter: which part of a wait is left to chance, from 0 to 1: with 0.5, between half of it and all.
    :param attempts: how many in a row may fail; None: any number.
    """

    first_s: float = 0.1
    longest_s: float = 30.0
    factor: float = 2.0
    jitter: float = 0.5
    attempts: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s:
            raise ValueError(f"waits go from first_s, above 0, up to longest_s: not {self.first_s} to {self.longest_s}")
        if self.factor < 1:
            raise ValueError(f"the factor from wait to wait is 1 at least, not {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"the jitter is a part, from 0 to 1, not {self.jitter}")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"there is 1 attempt at least, not {self.attempts}; None for any number")

    def waits(self, rng: random.Random) -> Iterator[float]:
        """The wait after each failed attempt, in seconds; it ends where there is to be no further one.

        :param chance: where the jitter comes from.
        """
        wait_s, failed = self.first_s, 1
        while self.attempts is None or failed < self.attempts:
            yield wait_s * (1 - self.jitter * rng.random())
            wait_s = min(wait_s * self.factor, self.longest_s)
            failed += 1


publish(__name__)
