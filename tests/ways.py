"""Selection of the ways in which a test runs: event loop, execution, and transport between two devices.

A way is a combination of the parameters of the fixtures below. A test's other parameters make its rows. By default each
row runs in one way, and the rows alternate between the ways, so that each file covers all ways. A test whose behaviour
may depend on the way is marked to run each row in every way:

    @pytest.mark.every_way
    async def test_closing_while_a_request_is_in_flight(device: Device) -> None: ...

If the loop does not matter, as in tests/fabric, a test is also marked `loops_in_turn`: then each row runs in every way
but alternates between the loops. On RDMA devices this holds for all tests.

`pytest --every-way` runs each test in every way.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Hashable, Sequence

import pytest

__all__ = ["ONLY_RDMA", "in_turn"]

# True if only tests on RDMA devices are collected: see `nox -s rdma`.
ONLY_RDMA = os.environ.get("AIOVERBS_TEST_DEVICES") == "rdma"

# Names of the parameters that make a way.
LOOPS = frozenset({"_asyncio_loop_factory", "loop_name"})
WAYS = LOOPS | {"aioverbs_device", "context", "device", "direct"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-way", action="store_true", help="run each test with every event loop and execution")


def in_turn(counts: Sequence[int], first: int) -> list[int]:
    """Choose one way for each row, such that all ways are used if there are enough rows.

    :param counts: number of possible ways of each row.
    :param first: way of the first row, modulo the number of ways.
    :returns: index of the way of each row.
    """
    # Each round starts one way later. Otherwise, if a parameter has as many values as there are ways, each of its
    # values would always have the same way.
    return [(first + row + row // count) % count for row, count in enumerate(counts)]


def _taken_in_turn(item: pytest.Function) -> frozenset[str]:
    """Return the names of the parameters between whose values a test's rows alternate."""
    if item.get_closest_marker("every_way") is None:
        return WAYS
    return LOOPS if ONLY_RDMA or item.get_closest_marker("loops_in_turn") else frozenset()


def _row(item: pytest.Function) -> Hashable:
    if not hasattr(item, "callspec"):
        return ()
    # The value of a row's parameter is the same object in each way, so its id identifies the row.
    names = item.callspec.params.keys() - _taken_in_turn(item)
    return tuple((name, id(item.callspec.params[name])) for name in sorted(names))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the ways in which a row does not run, considering only tests that are still selected, as by -k."""
    if config.getoption("every_way"):
        return
    tests: dict[str, dict[Hashable, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function):
            tests[item.nodeid.partition("[")[0]][_row(item)].append(item)
    left_out: set[pytest.Item] = set()
    for name, rows in tests.items():
        # The first way depends on the test's name only, so that it does not change when other tests are added.
        chosen = in_turn([len(ways) for ways in rows.values()], zlib.crc32(name.encode()))
        for ways, way in zip(rows.values(), chosen, strict=True):
            left_out.update(ways[:way] + ways[way + 1 :])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
