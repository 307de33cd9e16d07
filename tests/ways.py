"""In which ways a test runs: with which event loop, which execution, and which way between two devices.

A test has rows, by what it is parametrized with itself, and ways, by the fixtures below. Each row runs in one way, and
a test's rows take the ways in turn; so all ways are used in each file. A test runs each of its rows in every way if it
is marked so, because its behaviour can differ by them:

    @pytest.mark.every_way
    async def test_it_is_closed_while_a_request_is_under_way(device: Device) -> None: ...

Where the way between two devices matters and the loop does not, as in tests/fabric, a test is also marked
`loops_in_turn`: then each row runs in every way, but with the loops in turn. So do all tests on RDMA devices.

`pytest --every-way` runs each test in every way.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Hashable, Sequence

import pytest

__all__ = ["ONLY_RDMA", "in_turn"]

# Whether tests run on an RDMA device and those on software devices are not even collected: see `nox -s rdma`.
ONLY_RDMA = os.environ.get("AIOVERBS_TEST_DEVICES") == "rdma"

# The names of parameters that are ways.
LOOPS = frozenset({"_asyncio_loop_factory", "loop_name"})
WAYS = LOOPS | {"aioverbs_device", "context", "device", "direct"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-way", action="store_true", help="run each test with every event loop and execution")


def in_turn(counts: Sequence[int], first: int) -> list[int]:
    """Choose one way for each row, such that all are used if there are rows enough.

    :param counts: of each row, in how many ways it can run.
    :param first: the way that the first row takes, counted on from 0 beyond the last one.
    :returns: of each row, the position of its way.
    """
    # A step further each time round: else each value of a parameter with as many values would have a way of its own.
    return [(first + row + row // count) % count for row, count in enumerate(counts)]


def _taken_in_turn(item: pytest.Function) -> frozenset[str]:
    """The names of those ways that a test's rows take in turn."""
    if item.get_closest_marker("every_way") is None:
        return WAYS
    return LOOPS if ONLY_RDMA or item.get_closest_marker("loops_in_turn") else frozenset()


def _row(item: pytest.Function) -> Hashable:
    if not hasattr(item, "callspec"):
        return ()
    # The value of a row's parameter is the same object in each way.
    names = item.callspec.params.keys() - _taken_in_turn(item)
    return tuple((name, id(item.callspec.params[name])) for name in sorted(names))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the ways in which a row does not run. What was deselected before, as by -k, is no way any more."""
    if config.getoption("every_way"):
        return
    tests: dict[str, dict[Hashable, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function):
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
