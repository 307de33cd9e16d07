"""PURE: waits between attempts to connect."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from aioverbs._exports import publish

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with jitter.

    The upper limit of the waits grows with each failed attempt up to `longest_s`. Each wait is partly random, so that
    the clients of a lost peer do not all reconnect at the same time.

    :param first_s: upper limit of the first wait, in seconds, above 0.
    :param longest_s: upper limit of every wait, in seconds, at least `first_s`.
    :param factor: ratio of a wait's upper limit to that of the previous wait, 1 or more.
    :param jitter: random share of a wait, 0..1: with 0.5, a wait is between half of its upper limit and that limit.
    :param attempts: number of consecutive attempts that may fail, 1 or more; None for no limit.
    :raises ValueError: a value is out of its range.
    """

    first_s: float = 0.1
    longest_s: float = 30.0
    factor: float = 2.0
    jitter: float = 0.5
    attempts: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s:
            raise ValueError(
                f"`first_s` must be above 0 and at most `longest_s`, got {self.first_s} and {self.longest_s}"
            )
        if self.factor < 1:
            raise ValueError(f"`factor` must be 1 or more, got {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"`jitter` must be from 0 to 1, got {self.jitter}")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"`attempts` must be 1 or more, or None for no limit, got {self.attempts}")

    def waits(self, rng: random.Random) -> Iterator[float]:
        """Yield how long to wait after each failed attempt, in seconds, until no further attempt is allowed.

        :param rng: source of the jitter.
        :returns: an iterator over ``attempts`` - 1 waits; it never ends if ``attempts`` is None.
        """
        wait_s, failed = self.first_s, 1
        while self.attempts is None or failed < self.attempts:
            yield wait_s * (1 - self.jitter * rng.random())
            wait_s = min(wait_s * self.factor, self.longest_s)
            failed += 1


publish(__name__)
