"""In which ways a test runs: with which event loop, which execution, and which way between two devices.

A test has rows, by what it is parametrized with itself, and ways, by the fixtures below. Each row runs in one way, and
a test's rows take the ways in turn; so all ways are used in each file. A test runs each of its rows in every way if it
is marked so, because its behaviour can differ by them:

    @pytest.mark.every_way
    async def test_it_is_closed_while_a_request_is_under_way(device: Device) -> None: ...

`pytest --every-way` takes all tests for such.
"""

import zlib
from collections import defaultdict
from collections.abc import Hashable, Sequence

import pytest

__all__ = ["in_turn"]

# The names of parameters that are ways.
WAYS = {"_asyncio_loop_factory", "aioverbs_device", "context", "device", "direct", "loop_name"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-way", action="store_true", help="run each test with every event loop and execution")


def in_turn(counts: Sequence[int], first: int) -> list[int]:
    """Choose one way for each row, such that all are used if there are rows enough.

    :param counts: of each row, in how many ways it can run.
    :param first: the way that the first row takes, counted on from 0 beyond the last one.
    :returns: of each row, the position of its way.
    """
    return [(first + row) % count for row, count in enumerate(counts)]


def _takes_turns(item: pytest.Function) -> bool:
    return hasattr(item, "callspec") and item.get_closest_marker("every_way") is None


def _row(item: pytest.Function) -> Hashable:
    # The value of a row's parameter is the same object in each way.
    return tuple((name, id(value)) for name, value in sorted(item.callspec.params.items()) if name not in WAYS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the ways in which a row does not run. What was deselected before, as by -k, is no way any more."""
    if config.getoption("every_way"):
        return
    tests: dict[str, dict[Hashable, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and _takes_turns(item):
            tests[item.nodeid.partition("[")[0]][_row(item)].append(item)
    left_out: set[pytest.Item] = set()
    for name, rows in tests.items():
        # By its name, so that a test keeps its ways when others come or go.
        chosen = in_turn([len(ways) for ways in rows.values()], zlib.crc32(name.encode()))
        for ways, way in zip(rows.values(), chosen, strict=True):
            left_out.update(ways[:way] + ways[way + 1 :])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
