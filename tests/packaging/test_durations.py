import pytest

from aioverbs._durations import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (0.5e-9, "0.5 ns"),
        (999e-9, "999 ns"),
        (999.6e-9, "1 µs"),
        (1e-6, "1 µs"),
        (1.234e-6, "1.23 µs"),
        (12.345e-6, "12.3 µs"),
        (99.96e-6, "100 µs"),
        (999.7e-6, "1 ms"),
        (4.56e-3, "4.56 ms"),
        (0.05, "50 ms"),
        (1, "1 s"),
        (10.0, "10 s"),
        (1234, "1,234 s"),
    ],
)
def test_durations_have_three_digits_and_a_suitable_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
