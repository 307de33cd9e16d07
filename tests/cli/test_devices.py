"""`aioverbs devices` and `aioverbs completion`."""

import errno
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from aioverbs import LibraryNotFoundError, VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._providers import hardware
from aioverbs._verbs.device import devices
from aioverbs.cli import inventory, main
from tests.cli.processes import COMMAND, environment, run_command

DEVICE_KEYS = ["name", "provider", "problem", "active", "firmware", "node_guid", "vendor_id", "vendor_part_id"]
DEVICE_KEYS += ["ports", "native", "limits"]
PORT_KEYS = ["number", "state", "link_layer", "active_mtu", "max_message", "lid", "gids"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["devices", *arguments])


@pytest.fixture
def no_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "names", list)
    monkeypatch.delenv("AIOVERBS_SOFT_ADDRESS", raising=False)


def test_list_of_devices(no_hardware: None) -> None:
    done = invoke()
    assert (done.exit_code, done.stderr) == (0, "")
    title, line = done.stdout.splitlines()
    assert title.split() == ["DEVICE", "PORT", "STATE", "LINK", "MTU", "GID", "NATIVE"]
    assert line.split()[:5] == ["soft0", "1", "ACTIVE", "ETHERNET", "4096"]
    assert line.strip().endswith(", ".join(inventory.FEATURES.values()))


def test_json_output(no_hardware: None) -> None:
    result = json.loads(invoke("--json").stdout)
    assert list(result) == ["devices", "rdma_problem"]
    assert result["rdma_problem"] is None
    (device,) = result["devices"]
    assert list(device) == DEVICE_KEYS
    assert device["native"] == dict.fromkeys(inventory.FEATURES, True)
    (port,) = device["ports"]
    assert list(port) == PORT_KEYS
    (known,) = devices()
    assert [each["index"] for each in port["gids"] if each["preferred"]] == [known.ports[0].gid_index]
    assert port["gids"][1]["address"].startswith("::ffff:127.")
    assert port["gids"][1]["type"] == "ROCE_V2"
    assert device["limits"]["max_qp_wr"] >= 32


def test_details_of_one_device(no_hardware: None) -> None:
    done = invoke("soft0")
    assert done.exit_code == 0
    assert done.stdout.startswith("soft0 (software)\nfirmware soft-1, node GUID ")
    for text in ("\nport 1: ACTIVE, ETHERNET, MTU 4096", "default", "thread domains  yes", "max_qp_wr", "GLOB"):
        assert text in done.stdout
    (device,) = json.loads(invoke("soft0", "--json").stdout)["devices"]
    assert list(device) == DEVICE_KEYS


def test_unknown_device(no_hardware: None) -> None:
    done = invoke("mlx5_9")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == "aioverbs: there is no device 'mlx5_9'; available: soft0\n"


def test_missing_library_leaves_the_software_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[str]:
        raise LibraryNotFoundError("libibverbs.so.1", "no such file")

    monkeypatch.setattr(hardware, "names", fail)
    done = invoke()
    assert done.exit_code == 0
    assert "cannot be listed: libibverbs.so.1 cannot be loaded: install" in done.stdout
    assert "no such file" in json.loads(invoke("--json").stdout)["rdma_problem"]


def test_kernel_list_distinguishes_unusable_from_unknown_devices(monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(name: str) -> handles.Context:
        raise LibraryNotFoundError("libibverbs.so.1", "no such file")

    monkeypatch.setattr(hardware, "open_context", fail)
    monkeypatch.setattr(inventory, "kernel_devices", lambda: ["mlx5_0"])
    there = invoke("mlx5_0")
    assert there.exit_code == 1
    assert there.stdout.startswith("mlx5_0 (hardware)\nlibibverbs.so.1 cannot be loaded")
    nowhere = invoke("mlx5_9")
    assert (nowhere.exit_code, nowhere.stdout) == (3, "")
    assert nowhere.stderr == "aioverbs: there is no device 'mlx5_9'; available: mlx5_0, soft0\n"


def test_device_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> handles.Context:
        raise VerbsError("ibv_open_device", errno.EACCES)

    monkeypatch.setattr(hardware, "names", lambda: ["mlx5_0"])
    monkeypatch.setattr(hardware, "open_context", refuse)
    done = invoke()
    assert done.exit_code == 0
    assert "mlx5_0: ibv_open_device failed: EACCES" in done.stdout
    assert "soft0" in done.stdout
    alone = invoke("mlx5_0")
    assert alone.exit_code == 1
    assert alone.stdout.startswith("mlx5_0 (hardware)\nibv_open_device failed: EACCES")


def test_a_device_whose_name_is_not_utf_8() -> None:
    code = """
import os
from aioverbs import VerbsError
from aioverbs._providers import hardware
from aioverbs.cli.__main__ import main

def refuse(name):
    raise VerbsError("ibv_open_device", 5)

hardware.names = lambda: [os.fsdecode(b"r\\xff")]
hardware.open_context = refuse
main()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "devices"], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nr\\udcff: " in done.stdout


def test_unsupported_features(
    no_hardware: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(verb: str, number: int) -> type:
        def make(*arguments: object, **named: object) -> None:
            raise VerbsError(verb, number)

        return type(verb, (), {"__new__": make})

    monkeypatch.setattr(parent_domain, "ThreadDomain", lacking("ibv_alloc_td", errno.EOPNOTSUPP))
    monkeypatch.setattr(parent_domain, "ParentDomain", lacking("ibv_alloc_parent_domain", errno.EINVAL))
    monkeypatch.setattr(handles, "XrcDomain", lacking("ibv_open_xrcd", errno.ENOSYS))
    (device,) = json.loads(invoke("soft0", "--json").stdout)["devices"]
    lacks = {feature for feature, there in device["native"].items() if not there}
    assert lacks == {"thread_domains", "parent_domains", "allocators", "xrc_domains"}
    assert not caplog.records, "the report contains the missing features"
    monkeypatch.setattr(handles, "XrcDomain", lacking("ibv_open_xrcd", errno.ENOMEM))
    done = invoke("soft0")
    assert done.exit_code == 1
    assert "ibv_open_xrcd failed: ENOMEM" in done.stdout
    assert "port 1: ACTIVE" in done.stdout, "attributes are shown despite the problem"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str) -> None:
    done = CliRunner().invoke(main.main, ["completion", shell])
    assert done.exit_code == 0
    assert "_AIOVERBS_COMPLETE" in done.stdout


def test_completion_of_an_unknown_shell() -> None:
    assert CliRunner().invoke(main.main, ["completion", "cmd.exe"]).exit_code == 2


@pytest.mark.parametrize(("words", "found"), [("aioverbs dev", "devices"), ("aioverbs devices so", "soft0")])
def test_words_are_completed(words: str, found: str) -> None:
    count = str(len(words.split()) - 1)
    done = run_command(_AIOVERBS_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=count)
    assert done.stdout == f"plain,{found}\n"


def test_closed_output_pipe_prints_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, "devices"], env=environment(), stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
