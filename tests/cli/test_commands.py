"""Shared behaviour of all commands: help, start-up, errors, signals and JSON."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import anyio
import click
import pytest
from click.testing import CliRunner, Result

from aioverbs import DeviceNotFoundError, LibraryNotFoundError, LinkLayer, UnreachableError, VerbsError
from aioverbs.cli import common, main
from aioverbs.cli.common import Status
from tests.cli.processes import environment


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, arguments)


def test_each_command_has_help() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    for name in main.COMMANDS:
        assert f"\n  {name} " in done.output
        assert invoke(name, "--help").exit_code == 0


@pytest.mark.parametrize("arguments", [["frobnicate"], ["--frobnicate"], ["doctor", "--frobnicate"]])
def test_unknown_commands_and_options_are_usage_errors(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == Status.USAGE
    assert "frobnicate" in done.stderr


def test_help_lists_every_exit_status() -> None:
    table = invoke("--help").output.partition("Exit status:")[2]
    assert [int(line.split()[0]) for line in table.splitlines() if line.strip()] == list(Status)


def test_importing_commands_loads_no_heavy_modules() -> None:
    code = (
        "import sys; from importlib import import_module; from aioverbs.cli import main\n"
        "for name in main.COMMANDS: import_module(f'aioverbs.cli.{name}')\n"
        "print([name for name in sys.modules if name.startswith(('rich', 'uvloop', 'numpy'))])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment(), capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


# ---- Errors and signals


Trial = Callable[[Callable[[], None]], None]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Return a function that installs another function as the command ``trial``."""

    def make(function: Callable[[], None]) -> None:
        module = ModuleType("aioverbs.cli.trial")
        module.__dict__["trial"] = click.command()(function)
        monkeypatch.setitem(sys.modules, "aioverbs.cli.trial", module)
        monkeypatch.setattr(main, "COMMANDS", ("trial",))

    return make


def raising(error: BaseException) -> Callable[[], None]:
    def trial() -> None:
        raise error

    return trial


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DeviceNotFoundError("mlx5_7", ["soft0"]), 3, "there is no device 'mlx5_7'; available: soft0"),
        (LibraryNotFoundError("libibverbs.so.1"), 3, "libibverbs.so.1 cannot be loaded: install"),
        (UnreachableError("rdma_resolve_addr", errno.ETIMEDOUT), 3, "rdma_resolve_addr failed: ETIMEDOUT"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), 3, "[Errno 111] no"),
        (VerbsError("ibv_create_qp", errno.ENOMEM), 4, "ibv_create_qp failed: ENOMEM"),
        (BaseExceptionGroup("", [ExceptionGroup("", [ValueError("first\n  line")])]), 4, "first line"),
        (anyio.BrokenResourceError(), 4, "BrokenResourceError"),
        (KeyError("x"), 4, "KeyError: 'x' (aioverbs --traceback … shows where)"),
    ],
)
def test_an_error_is_one_line(trial: Trial, error: BaseException, status: int, message: str) -> None:
    trial(raising(error))
    done = invoke("trial")
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.startswith(f"aioverbs: {message}")
    assert done.stderr.count("\n") == 1


def test_traceback_option_raises_the_error(trial: Trial) -> None:
    error = KeyError("x")
    trial(raising(error))
    assert invoke("--traceback", "trial").exception is error


def test_keyboard_interrupt_prints_nothing(trial: Trial) -> None:
    trial(raising(KeyboardInterrupt()))
    done = invoke("trial")
    assert (done.exit_code, done.output) == (Status.INTERRUPTED, "")


def test_a_coroutine_returns_the_exit_status(trial: Trial) -> None:
    async def main() -> Status:
        return Status.NO

    trial(lambda: common.run(main()))
    assert invoke("trial").exit_code == Status.NO


SCRIPT = """
import asyncio, click
from aioverbs.cli.common import Status, run, UntilStopped

async def trial():
    with UntilStopped():
        print("begun", flush=True)
        await asyncio.sleep(30)
    print("summary", flush=True)
    await asyncio.sleep({after})
    return Status.NO

@click.command()
def command():
    run(trial())

command()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_signals_end_the_block(number: signal.Signals, loop: str) -> None:
    hide = "import sys; sys.modules['uvloop'] = None\n" if loop == "asyncio" else ""
    command = [sys.executable, "-P", "-c", hide + SCRIPT.format(after=0)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.read() == "summary\n"
    assert process.returncode == Status.NO


def test_a_second_interrupt_ends_the_process() -> None:
    command = [sys.executable, "-P", "-c", SCRIPT.format(after=30)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for message in ("begun\n", "summary\n"):
            assert process.stdout.readline() == message
            process.send_signal(signal.SIGINT)
    assert process.returncode == 1, "exit status of click for Abort, without the group of commands"


# ---- JSON and completion


@dataclass(frozen=True)
class Thing:
    name: str
    kind: LinkLayer
    sizes: tuple[float, ...]
    more: "Thing | None" = None


def test_json_of_dataclasses_enums_and_sets(capsys: pytest.CaptureFixture[str]) -> None:
    thing = Thing("a", LinkLayer.ETHERNET, (1, 0.5), Thing("b", LinkLayer.INFINIBAND, ()))
    common.print_json({"thing": thing, "flags": frozenset("ba"), "exists": True}, one_line=True)
    inner = '{"name": "b", "kind": "INFINIBAND", "sizes": [], "more": null}'
    assert capsys.readouterr().out == (
        f'{{"thing": {{"name": "a", "kind": "ETHERNET", "sizes": [1, 0.5], "more": {inner}}}, '
        '"flags": ["a", "b"], "exists": true}\n'
    )
    with pytest.raises(TypeError, match="object"):
        common.print_json([object()])


def test_device_names_complete() -> None:
    context, parameter = click.Context(main.main), click.Argument(["device"])
    assert common.device_names(context, parameter, "so") == ["soft0"]
    assert "soft0" in common.device_names(context, parameter, "")
    assert common.device_names(context, parameter, "so0") == []
