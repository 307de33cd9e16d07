"""The commands `aioverbs devices`, `ping` and `top` on RDMA devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from aioverbs import devices
from aioverbs.cli.inventory import FEATURES
from tests.cli.processes import parse_lines, ping_server, run_command, start_command
from tests.rdma.cm import address_of, free_port, nothing_left
from tests.rdma.seam import rdma_devices

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(240)]

NATIVE = {"thread domains": "thread_domains", "parent domains": "parent_domains", "XRC domains": "xrc_domains"}
NOT_NATIVE = "not native from here on"  # logged for soft-RoCE


def complaints(text: str) -> list[str]:
    return [line for line in text.splitlines() if NOT_NATIVE not in line]


def listed(*arguments: str) -> list[dict[str, Any]]:
    done = run_command("devices", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["rdma_problem"] is None
    found: list[dict[str, Any]] = result["devices"]
    return found


def test_devices() -> None:
    with nothing_left():
        found = {each["name"]: each for each in listed()}
    assert list(found)[-1] == "soft0"
    assert set(found) >= set(rdma_devices())
    for known in devices():
        result = found[known.name]
        assert (result["provider"], result["active"], result["problem"]) == (known.provider, known.active, None)
        assert list(result["native"]) == list(FEATURES)
        assert {name for name, feature in NATIVE.items() if result["native"][feature]} == known.native
        for port, known_port in zip(result["ports"], known.ports, strict=True):
            assert port["state"] == known_port.state.name
            assert [gid["index"] for gid in port["gids"]] == [index for index, _ in known_port.gids]
            assert [gid["index"] for gid in port["gids"] if gid["preferred"]] == [known_port.gid_index]


def test_one_device() -> None:
    name = rdma_devices()[0]
    (result,) = listed(name)
    (port, *_) = result["ports"]
    (gid,) = (each for each in port["gids"] if each["preferred"])
    if port["link_layer"] == "ETHERNET":
        assert (gid["type"], gid["address"]) == ("ROCE_V2", f"::ffff:{address_of(name)}")
    text = run_command("devices", name).stdout
    assert text.startswith(f"{name} (hardware)\n")
    assert gid["address"] in text


@pytest.mark.parametrize(
    ("verb", "transport"),
    [
        ("send", "rdmacm"),
        pytest.param("write", "tcp", marks=pytest.mark.rdma_all),
        pytest.param("read", "rdmacm", marks=pytest.mark.rdma_all),
    ],
)
def test_ping(verb: str, transport: str) -> None:
    near, *_, far = rdma_devices() * 2
    port = str(free_port())
    both = ("--transport", transport)
    with nothing_left():
        with ping_server("--port", port, "--device", far, *both, host=address_of(far)) as (_, address):
            done = run_command(
                "ping", address, "--device", near, *both, "--json", "-f", "-c", "200", "-v", verb, "-s", "5000"
            )
        assert (done.returncode, complaints(done.stderr)) == (0, [])
        (summary,) = parse_lines(done.stdout)
        assert (summary["device"], summary["sent"], summary["received"]) == (near, 200, 200)
        assert 0 < summary["latency_ns"]["min"] <= summary["latency_ns"]["p50"] <= summary["latency_ns"]["max"]


@pytest.mark.rdma_all
def test_ping_without_a_server() -> None:
    name = rdma_devices()[0]
    done = run_command("ping", f"{address_of(name)}:{free_port()}", "--device", name, "--transport", "rdmacm")
    assert done.returncode == 3
    assert "no program listens at that port" in done.stderr


def sampled(pid: int, **variables: str) -> dict[str, Any]:
    done = run_command("top", str(pid), "--once", "--json", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    (result,) = parse_lines(done.stdout)
    return result


@pytest.mark.rdma_all
def test_top(tmp_path: Path) -> None:
    name, port = rdma_devices()[0], str(free_port())
    watched = {"AIOVERBS_MONITOR_DIRECTORY": str(tmp_path / "monitor")}
    on = ("--device", name)
    with (
        ping_server("--port", port, *on, host=address_of(name), AIOVERBS_MONITOR="1", **watched) as (process, address),
        start_command("ping", address, *on, "-f", "--count", "1000000") as client,
    ):
        try:
            result = sampled(process.pid, **watched)
            while not result["rates"]["operations"]:  # the client has not begun yet; if it ends first, the test fails
                assert client.poll() is None
                result = sampled(process.pid, **watched)
        finally:
            client.kill()
    assert result["rates"]["operations"] > 0
    (device,) = result["devices"]
    assert (device["kind"], device["label"]) == ("Device", name)
