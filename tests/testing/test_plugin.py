"""pytest plugin `aioverbs.testing`, used by a test suite of its own."""

import pytest

import aioverbs
from aioverbs import WcStatus, WorkCompletionError
from tests.data_path.ends import ends

pytest_plugins = ["pytester"]

CONFTEST = """
pytest_plugins = ["aioverbs.testing"]
"""
USERS_TESTS = """
from aioverbs._core.handles import handles

async def test_forgets(aioverbs_device):
    device = aioverbs_device
    await device.open()
    pd = device.protection_domain()
    await pd.open()
    await pd.aclose()

async def test_begins_with_nothing(aioverbs_device):
    assert not handles.open_handles()
    async with aioverbs_device as device:
        assert device.software

async def test_fails_by_itself(aioverbs_device):
    await aioverbs_device.open()
    raise ValueError("for a reason of its own")
"""


@pytest.fixture
def result(pytester: pytest.Pytester) -> pytest.RunResult:
    """Run a user's tests in a process; return the outcome of each."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(USERS_TESTS)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    return pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider")


def test_leaked_resources_are_reported_once(result: pytest.RunResult) -> None:
    """A leak is an error of that test only, with both executions; a test that failed gets no second error."""
    result.assert_outcomes(passed=4, failed=2, errors=2)
    result.stdout.fnmatch_lines(["*left open: <Context of soft0*", "*ValueError: for a reason of its own*"])


async def test_faults_are_planned(aioverbs_device: aioverbs.Device) -> None:
    async with aioverbs_device as device, ends(device) as here:
        device.faults.fail_request(WcStatus.REM_ACCESS_ERR, here.near.handle)
        with pytest.raises(WorkCompletionError) as caught:
            await here.write(b"some")
        assert caught.value.status is WcStatus.REM_ACCESS_ERR
