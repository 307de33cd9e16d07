"""PURE: durations as text."""

__all__ = ["duration"]


def duration(seconds: float) -> str:
    """Return a duration as text with up to three significant digits, in the unit that fits best, such as ``"12.3 µs"``
    or ``"10 s"``.

    :param seconds: duration in seconds, not negative.
    :returns: number and unit.
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-9)} ns"


def _three(value: float) -> str:
    """Return a number as text, rounded to three significant digits if it is less than 1,000 and to an integer
    otherwise. Zeros at the end of the fraction are omitted.
    """
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text
