"""`aioverbs ping`: client and server as processes, their output and exit status, and invalid input."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from aioverbs import Connection, MessageModel, connect, open_device, serve
from aioverbs._connection.connect import Transport
from aioverbs.cli import main, ping, ping_client, ping_serve
from aioverbs.cli.ping_client import Pings, Tally, connect_pings
from aioverbs.cli.ping_request import (
    LARGEST,
    SMALLEST,
    PingRefusedError,
    PingRequest,
    Verb,
    check_answer,
    pack_accepted,
    pack_refused,
)
from tests.cli.processes import parse_lines, ping_server, read_line, run_command, start_command, stop
from tests.listening import own_address
from tests.pace import patience
from tests.sockets import directory_of_sockets, short_path
from tests.waiting import wait_until

__all__ = ["directory_of_sockets", "short_path"]

LOW = [MessageModel.LOW_LATENCY, MessageModel.FORCE_LOW_LATENCY]
LATENCIES = ["min", "mean", "stddev", "p50", "p90", "p99", "p99.9", "max"]
SUMMARY = ["event", "host", "port", "device", "verb", "size", "message_model", "sent", "received", "lost", "broken"]
SUMMARY += ["duration_s", "latency_ns", "histogram"]


# ---- Client and server


@pytest.mark.parametrize("verb", get_args(Verb))
def test_text_output(verb: str) -> None:
    with ping_server("--port", "0") as (process, address):
        done = run_command("ping", address, "-c", "3", "-i", "0.01", "--verb", verb, "--size", "100")
        assert (done.returncode, done.stderr) == (0, "")
        title, *answers, head, counts, latency, _ = done.stdout.splitlines()[:8]
        assert title == f"PING {address} on device soft0: {verb} of 100 bytes, default"
        assert [answer.partition(" time=")[0] for answer in answers] == [
            f"100 bytes from {address}: seq={number}" for number in (1, 2, 3)
        ]
        assert head == f"--- {address} ---"
        assert counts.startswith("3 sent, 3 answered, 0 % lost, in ")
        assert [each.split()[0] for each in latency.split(", ")] == LATENCIES
        assert "█" in done.stdout
        status, result, errors = stop(process)
        assert (status, errors) == (0, "")
        peer, disconnected = parse_lines(result)
        assert (peer["event"], peer["verb"], peer["size"]) == ("peer", verb, 100)
        assert (disconnected["event"], disconnected["messages"]) == ("disconnected", 3 if verb == "send" else 0)


@pytest.mark.parametrize("model", ping.MODELS)
def test_json_output(model: str) -> None:
    with ping_server("--port", "0", "--message-model", model) as (_, address):
        done = run_command("ping", address, "--json", "-c", "20", "-i", "0", "--message-model", model)
    assert (done.returncode, done.stderr) == (0, "")
    *answers, summary = parse_lines(done.stdout)
    assert [each["seq"] for each in answers] == list(range(1, 21))
    assert list(summary) == SUMMARY
    assert (summary["sent"], summary["received"], summary["lost"]) == (20, 20, 0)
    assert list(summary["latency_ns"]) == LATENCIES
    times = [each["time_ns"] for each in answers]
    assert (summary["latency_ns"]["min"], summary["latency_ns"]["max"]) == (min(times), max(times))
    assert sum(row["count"] for row in summary["histogram"]) == 20
    assert summary["message_model"] == model


def test_flood_prints_only_the_summary() -> None:
    with ping_server("--port", "0") as (_, address):
        (summary,) = parse_lines(run_command("ping", address, "--json", "-f", "-c", "500", "--verb", "read").stdout)
    assert summary["received"] == 500


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_client_with_a_summary(number: signal.Signals) -> None:
    with ping_server("--port", "0") as (_, address), start_command("ping", address, "--json", "-i", "0.05") as process:
        assert json.loads(read_line(process))["seq"] == 1
        status, output, errors = stop(process, number)
    assert (status, errors) == (0, "")
    assert parse_lines(output)[-1]["event"] == "summary"


def operations_of(pid: int, **environment: str) -> float:
    """Return the number of operations that a process completed in a tenth of a second."""
    (result,) = parse_lines(run_command("top", str(pid), "--once", "--json", "-i", "0.1", **environment).stdout)
    return float(result["rates"]["operations"] * result["seconds"])


def test_a_signal_ends_a_flood(tmp_path: Path) -> None:
    watched = {"AIOVERBS_MONITOR_DIRECTORY": str(tmp_path / "monitor")}
    with (
        ping_server("--port", "0") as (_, address),
        start_command("ping", address, "-f", AIOVERBS_MONITOR="1", **watched) as process,
    ):
        assert read_line(process).startswith("PING ")  # connected: from here on the client only pings
        wait_until(lambda: operations_of(process.pid, **watched) >= 10)
        status, output, errors = stop(process)
    assert (status, errors) == (0, "")
    assert " 0 % lost" in output


def test_a_killed_server_ends_the_client() -> None:
    with (
        ping_server("--port", "0") as (process, address),
        start_command("ping", address, "--json", "-i", "0.05") as client,
    ):
        assert json.loads(read_line(client))["seq"] == 1
        process.kill()
        output, _ = client.communicate(timeout=patience(30))
    assert client.returncode == 1
    summary = parse_lines(output)[-1]
    assert summary["lost"] == 1
    assert summary["broken"]


@pytest.mark.stops_processes
def test_answers_of_a_stopped_server_are_lost() -> None:
    few = ("-c", "3", "-i", "0.5", "-t", "1")
    with ping_server("--port", "0") as (process, address), start_command("ping", address, "--json", *few) as client:
        read_line(client)
        process.send_signal(signal.SIGSTOP)  # before the third request
        output, _ = client.communicate(timeout=patience(30))
    summary = parse_lines(output)[-1]
    assert (client.returncode, summary["sent"], summary["broken"]) == (1, 3, None)
    assert summary["lost"] in (1, 2)


async def test_a_late_answer_is_skipped() -> None:
    late, result = asyncio.Event(), list[tuple[int, bool]]()

    async def answer(connection: Connection) -> None:
        await connection.receive()
        await connection.send(pack_accepted())
        async for message in connection:
            if int.from_bytes(message[:8]) == 2:
                await late.wait()
            await connection.send(message)

    def tell(number: int, nanoseconds: int | None) -> None:
        result.append((number, nanoseconds is None))
        if number == 2:
            late.set()

    tally = Tally()
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(answer, "127.0.0.1", domain=domain) as slow,
        contextlib.AsyncExitStack() as stack,
    ):
        once = await connect_pings(stack, domain, "127.0.0.1", slow.port, "auto", PingRequest("send", 64))
        await Pings(once, 1, 0, patience(5), tell).run(tally)
        await Pings(once, 2, 0, 0.1, tell).run(tally)
        await Pings(once, 4, 0, patience(5), tell).run(tally)
    assert result == [(1, False), (2, True), (3, False), (4, False)]
    assert (tally.sent, tally.received, tally.lost, tally.broken) == (4, 3, 1, None)


async def test_a_wrong_answer_breaks_the_connection() -> None:
    async def answer(connection: Connection) -> None:
        await connection.receive()
        await connection.send(pack_accepted())
        async for message in connection:
            await connection.send(message[:-1] + b"!")

    tally = Tally()
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(answer, "127.0.0.1", domain=domain) as wrong,
        contextlib.AsyncExitStack() as stack,
    ):
        once = await connect_pings(stack, domain, "127.0.0.1", wrong.port, "auto", PingRequest("send", 64))
        await Pings(once, 1, 0, patience(5), lambda number, nanoseconds: None).run(tally)
    assert tally.lost == 1
    assert tally.broken == "the answer to message 1 differs from the message"


# ---- Failing to connect


async def test_timeout_of_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping_client, "_CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        message = f"^cannot connect to 127.0.0.1, port {port}: .*50 ms"
        async with (
            open_device("soft0") as device,
            device.resource_domain() as domain,
            contextlib.AsyncExitStack() as stack,
        ):
            with pytest.raises(ConnectionError, match=message):
                await connect_pings(stack, domain, "127.0.0.1", port, "tcp", PingRequest("send", 64))


def test_port_without_listener() -> None:
    host, port = own_address(), 1  # a port that the kernel never assigns
    done = run_command("ping", f"{host}:{port}", "-c", "1")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"aioverbs: cannot connect to {host}, port {port}: [Errno 111] Connection refused\n"


def test_unknown_host() -> None:
    done = run_command("ping", "no-such-host.invalid", "-c", "1")
    assert done.returncode == 3
    assert done.stderr.startswith("aioverbs: cannot connect to no-such-host.invalid, port 7471: ")


def test_server_of_another_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            with listening.accept()[0] as peer:
                peer.sendall(b"220 mail.example.com ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = run_command("ping", f"127.0.0.1:{port}", "-c", "1")
        thread.join()
    assert done.returncode == 3
    assert done.stderr.startswith(f"aioverbs: cannot connect to 127.0.0.1, port {port}: ")


async def test_aioverbs_server_that_is_no_ping_server() -> None:
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(lambda connection: connection.send(b"hello"), "127.0.0.1", domain=domain) as other,
    ):
        done = await asyncio.to_thread(run_command, "ping", f"127.0.0.1:{other.port}", "-c", "1")
    assert done.returncode == 3
    assert "the server is not `aioverbs ping serve` of this version" in done.stderr


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run_command("ping", "serve", "127.0.0.1", "--port", str(other.getsockname()[1]))
    assert (done.returncode, done.stdout) == (4, "")
    assert "Address already in use" in done.stderr


def test_rdma_cm_needs_an_rdma_device() -> None:
    done = run_command("ping", "127.0.0.1", "--transport", "rdmacm")
    assert done.returncode == 4
    assert 'pass transport="tcp"' in done.stderr


# ---- Command lines


INVALID_COMMAND_LINES = [
    (["host", "--count", "0"], "0 is not in the range"),
    (["host", "--size", "7"], "7 is not in the range"),
    (["host", "--interval", "-1"], "-1"),
    (["host", "--interval", "inf"], "expected a finite number of seconds, got inf"),
    (["host", "--timeout", "nan"], "expected a finite number of seconds, got nan"),
    (["host", "--timeout", "0"], "0.0 is not in the range"),
    (["host", "--verb", "shout"], "'shout' is not one of"),
    (["host", "--message-model", "fast"], "'fast' is not one of"),
    (["host", "another"], "unexpected extra argument"),
    (["host:0"], "expected a port from 1 to 65535"),
    (["host:65536"], "expected a port from 1 to 65535"),
    (["host:"], "expected a port from 1 to 65535"),
    (["host:http"], "got 'http'"),
    ([":7471"], "expected an address like HOST"),
    (["[::1"], "expected an address like HOST"),
    (["[::1]7471"], "expected an address like HOST"),
    (["[]:1"], "expected an address like HOST"),
    ([""], "expected an address like HOST"),
    (["[::1]:"], "expected a port from 1 to 65535"),
    (["serve", "--port", "65536"], "65536 is not in the range"),
]


def test_invalid_command_lines() -> None:
    for arguments, message in INVALID_COMMAND_LINES:
        done = CliRunner().invoke(main.main, ["ping", *arguments])
        assert done.exit_code == 2, arguments
        assert message in " ".join(done.stderr.split())


ADDRESSES = [
    ("host", ("host", 7471)),
    ("host:1", ("host", 1)),
    ("::1", ("::1", 7471)),
    ("[::1]", ("::1", 7471)),
    ("[::1]:99", ("::1", 99)),
    ("10.0.0.1:65535", ("10.0.0.1", 65535)),
]


def test_addresses() -> None:
    assert [(text, ping._parse_address(text)) for text, _ in ADDRESSES] == ADDRESSES


def test_command_line_choices_match_the_library() -> None:
    assert [ping._model(name) for name in ping.MODELS] == [MessageModel.DEFAULT, *LOW, MessageModel.HIGH_BANDWIDTH]
    assert len(ping.MODELS) == len(MessageModel)
    assert (ping.SMALLEST, ping.LARGEST) == (SMALLEST, LARGEST)
    options = {each.name: each.type for each in ping.to.params}
    assert tuple(getattr(options["verb"], "choices")) == get_args(Verb)  # noqa: B009
    assert set(getattr(options["transport"], "choices")) == set(get_args(Transport))  # noqa: B009


# ---- Requests


@pytest.mark.parametrize("verb", get_args(Verb))
def test_request_round_trip(verb: Verb) -> None:
    request = PingRequest(verb, 4096)
    assert PingRequest.parse(request.pack()) == request


INVALID_REQUESTS = [
    (b"", "expected JSON"),
    (b"[" * 900, "expected JSON"),
    (b"\xff", "expected JSON"),
    (b"[]", "expected a JSON object, got list"),
    (b" " * 1001, "at most 1,000 bytes, got 1,001"),
    (b"{}", "expected a request of `aioverbs ping` version 1"),
    (b'{"aioverbs-ping": 2, "verb": "send", "size": 64}', "expected a request of `aioverbs ping` version 1"),
    (b'{"aioverbs-ping": 1, "verb": "send"}', "got 'verb'"),
    (b'{"aioverbs-ping": 1}', "got no fields"),
    (b'{"aioverbs-ping": 1, "verb": "send", "size": 64, "more": 1}', "'more'"),
    (b'{"aioverbs-ping": 1, "verb": ["send"], "size": 64}', "must be send, read or write, got"),
    (b'{"aioverbs-ping": 1, "verb": "send", "size": true}', "must be an integer, got True"),
    (b'{"aioverbs-ping": 1, "verb": "send", "size": 64.0}', "must be an integer, got 64.0"),
    (b'{"aioverbs-ping": 1, "verb": "read", "size": 1000000000000}', "from 8 to 67,108,864 bytes"),
    (b'{"aioverbs-ping": 1, "verb": "read", "size": -1}', "from 8 to"),
]


def test_invalid_requests() -> None:
    for request, message in INVALID_REQUESTS:
        with pytest.raises(ValueError, match=message):
            PingRequest.parse(request)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["send", "read", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["aioverbs-ping", "verb", "size", "refused"]), inner)
    ),
)
ALIKE = st.fixed_dictionaries({"aioverbs-ping": st.just(1), "verb": JSON, "size": JSON})


@given(st.binary() | (JSON | ALIKE).map(json.dumps).map(str.encode))
def test_parsing_any_bytes_raises_no_other_error(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        request = PingRequest.parse(message)
        assert PingRequest.parse(request.pack()) == request
    with contextlib.suppress(PingRefusedError):
        check_answer(message)


def test_refused_request() -> None:
    with pytest.raises(PingRefusedError, match="the server refused the request: too much"):
        check_answer(pack_refused("too much"))
    with pytest.raises(PingRefusedError, match="the server refused the request: ééé"):
        check_answer(pack_refused("é" * 5000))


async def test_the_server_refuses_an_invalid_request() -> None:
    events: list[tuple[str, object]] = []

    def on_event(name: str, **fields: object) -> None:
        events.append((name, fields.get("reason")))

    async with open_device("soft0") as device, device.resource_domain() as domain:
        server = ping_serve._server(domain, "127.0.0.1", 0, "tcp", on_event)
        async with server, connect("127.0.0.1", server.port, domain=domain) as connection:
            await connection.send(b"[]")
            with pytest.raises(PingRefusedError, match="expected a JSON object, got list"):
                check_answer(await connection.receive())
    ((name, reason),) = events
    assert (name, reason) == ("refused", "expected a JSON object, got list")
