"""`aioverbs ping`: both ends as processes, what they print, how they exit, and what they do not take."""

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

from aioverbs import Connection, MessageModel, open_device, serve
from aioverbs._connection.connect import Transport
from aioverbs.cli import main, ping, ping_client
from aioverbs.cli.ping_client import Pings, Tally, connected
from aioverbs.cli.ping_request import (
    LARGEST,
    SMALLEST,
    PingRefusedError,
    PingRequest,
    Verb,
    accepted,
    check_answer,
    refused,
)
from tests.cli.processes import ask, ended, line_of, lines, server, started
from tests.listening import own_address
from tests.pace import patience
from tests.sockets import directory_of_sockets, short_path
from tests.waiting import wait_until

__all__ = ["directory_of_sockets", "short_path"]

LOW = [MessageModel.LOW_LATENCY, MessageModel.FORCE_LOW_LATENCY]
LATENCIES = ["min", "mean", "stddev", "p50", "p90", "p99", "p99.9", "max"]
SUMMARY = ["event", "host", "port", "device", "verb", "size", "message_model", "sent", "received", "lost", "broken"]
SUMMARY += ["duration_s", "latency_ns", "histogram"]


# ---- Both ends


@pytest.mark.parametrize("verb", get_args(Verb))
def test_for_people(verb: str) -> None:
    with server("--port", "0") as (process, address):
        done = ask("ping", address, "-c", "3", "-i", "0.01", "--verb", verb, "--size", "100")
        assert (done.returncode, done.stderr) == (0, "")
        title, *answers, head, counts, latency, _ = done.stdout.splitlines()[:8]
        assert title == f"PING {address} by soft0: {verb} of 100 bytes, default"
        assert [answer.partition(" time=")[0] for answer in answers] == [
            f"100 bytes from {address}: seq={number}" for number in (1, 2, 3)
        ]
        assert head == f"--- {address} ---"
        assert counts.startswith("3 sent, 3 answered, 0 % lost, in ")
        assert [each.split()[0] for each in latency.split(", ")] == LATENCIES
        assert "█" in done.stdout
        status, told, complaints = ended(process)
        assert (status, complaints) == (0, "")
        peer, gone = lines(told)
        assert (peer["event"], peer["verb"], peer["size"]) == ("peer", verb, 100)
        assert (gone["event"], gone["messages"]) == ("gone", 3 if verb == "send" else 0)


@pytest.mark.parametrize("model", ping.MODELS)
def test_for_programs(model: str) -> None:
    with server("--port", "0", "--message-model", model) as (_, address):
        done = ask("ping", address, "--json", "-c", "20", "-i", "0", "--message-model", model)
    assert (done.returncode, done.stderr) == (0, "")
    *answers, summary = lines(done.stdout)
    assert [each["seq"] for each in answers] == list(range(1, 21))
    assert list(summary) == SUMMARY
    assert (summary["sent"], summary["received"], summary["lost"]) == (20, 20, 0)
    assert list(summary["latency_ns"]) == LATENCIES
    times = [each["time_ns"] for each in answers]
    assert (summary["latency_ns"]["min"], summary["latency_ns"]["max"]) == (min(times), max(times))
    assert sum(row["count"] for row in summary["histogram"]) == 20
    assert summary["message_model"] == model


def test_flood_has_a_summary_only() -> None:
    with server("--port", "0") as (_, address):
        (summary,) = lines(ask("ping", address, "--json", "-f", "-c", "500", "--verb", "read").stdout)
    assert summary["received"] == 500


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_summary(number: signal.Signals) -> None:
    with server("--port", "0") as (_, address), started("ping", address, "--json", "-i", "0.05") as process:
        assert json.loads(line_of(process))["seq"] == 1
        status, output, complaints = ended(process, number)
    assert (status, complaints) == (0, "")
    assert lines(output)[-1]["event"] == "summary"


def operations_of(pid: int, **environment: str) -> float:
    """How many it ended in a tenth of a second."""
    (told,) = lines(ask("top", str(pid), "--once", "--json", "-i", "0.1", **environment).stdout)
    return float(told["rates"]["operations"] * told["seconds"])


def test_a_signal_ends_a_flood(tmp_path: Path) -> None:
    watched = {"AIOVERBS_MONITOR_DIRECTORY": str(tmp_path / "monitor")}
    with (
        server("--port", "0") as (_, address),
        started("ping", address, "-f", AIOVERBS_MONITOR="1", **watched) as process,
    ):
        assert line_of(process).startswith("PING ")  # it is connected: all that it does from here on is to ping
        wait_until(lambda: operations_of(process.pid, **watched) >= 10)
        status, output, complaints = ended(process)
    assert (status, complaints) == (0, "")
    assert " 0 % lost" in output


def test_the_server_dies() -> None:
    with server("--port", "0") as (process, address), started("ping", address, "--json", "-i", "0.05") as client:
        assert json.loads(line_of(client))["seq"] == 1
        process.kill()
        output, _ = client.communicate(timeout=patience(30))
    assert client.returncode == 1
    summary = lines(output)[-1]
    assert summary["lost"] == 1
    assert summary["broken"]


@pytest.mark.stops_processes
def test_a_server_that_stands_still() -> None:
    few = ("-c", "3", "-i", "0.5", "-t", "1")
    with server("--port", "0") as (process, address), started("ping", address, "--json", *few) as client:
        line_of(client)
        process.send_signal(signal.SIGSTOP)  # before the third one
        output, _ = client.communicate(timeout=patience(30))
    summary = lines(output)[-1]
    assert (client.returncode, summary["sent"], summary["broken"]) == (1, 3, None)
    assert summary["lost"] in (1, 2)


async def test_an_answer_that_comes_too_late_is_passed_over() -> None:
    late, told = asyncio.Event(), list[tuple[int, bool]]()

    async def answer(connection: Connection) -> None:
        await connection.receive()
        await connection.send(accepted())
        async for message in connection:
            if int.from_bytes(message[:8]) == 2:
                await late.wait()
            await connection.send(message)

    def tell(number: int, nanoseconds: int | None) -> None:
        told.append((number, nanoseconds is None))
        if number == 2:
            late.set()

    tally = Tally()
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(answer, "127.0.0.1", domain=domain) as slow,
        contextlib.AsyncExitStack() as stack,
    ):
        once = await connected(stack, domain, "127.0.0.1", slow.port, "auto", PingRequest("send", 64))
        await Pings(once, 1, 0, patience(5), tell).run(tally)
        await Pings(once, 2, 0, 0.1, tell).run(tally)
        await Pings(once, 4, 0, patience(5), tell).run(tally)
    assert told == [(1, False), (2, True), (3, False), (4, False)]
    assert (tally.sent, tally.received, tally.lost, tally.broken) == (4, 3, 1, None)


async def test_what_comes_back_is_something_else() -> None:
    async def answer(connection: Connection) -> None:
        await connection.receive()
        await connection.send(accepted())
        async for message in connection:
            await connection.send(message[:-1] + b"!")

    tally = Tally()
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(answer, "127.0.0.1", domain=domain) as wrong,
        contextlib.AsyncExitStack() as stack,
    ):
        once = await connected(stack, domain, "127.0.0.1", wrong.port, "auto", PingRequest("send", 64))
        await Pings(once, 1, 0, patience(5), lambda number, nanoseconds: None).run(tally)
    assert tally.lost == 1
    assert tally.broken == "what came back is not message 1 as it was sent"


# ---- Who is not there, or not that


async def test_what_was_waited_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping_client, "_CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        message = f"^no connection to 127.0.0.1, port {port}: .*50 ms"
        async with (
            open_device("soft0") as device,
            device.resource_domain() as domain,
            contextlib.AsyncExitStack() as stack,
        ):
            with pytest.raises(ConnectionError, match=message):
                await connected(stack, domain, "127.0.0.1", port, "tcp", PingRequest("send", 64))


def test_nobody_is_there() -> None:
    host, port = own_address(), 1  # a port that nobody is given, either
    done = ask("ping", f"{host}:{port}", "-c", "1")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"aioverbs: no connection to {host}, port {port}: [Errno 111] Connection refused\n"


def test_a_name_that_is_none() -> None:
    done = ask("ping", "no-such-host.invalid", "-c", "1")
    assert done.returncode == 3
    assert done.stderr.startswith("aioverbs: no connection to no-such-host.invalid, port 7471: ")


def test_somebody_else_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            with listening.accept()[0] as peer:
                peer.sendall(b"220 mail.example.com ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = ask("ping", f"127.0.0.1:{port}", "-c", "1")
        thread.join()
    assert done.returncode == 3
    assert done.stderr.startswith(f"aioverbs: no connection to 127.0.0.1, port {port}: ")


async def test_another_service_of_ours_is_there() -> None:
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(lambda connection: connection.send(b"hello"), "127.0.0.1", domain=domain) as other,
    ):
        done = await asyncio.to_thread(ask, "ping", f"127.0.0.1:{other.port}", "-c", "1")
    assert done.returncode == 3
    assert "who listens there is no `aioverbs ping serve` of this version" in done.stderr


def test_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = ask("ping", "serve", "127.0.0.1", "--port", str(other.getsockname()[1]))
    assert (done.returncode, done.stdout) == (4, "")
    assert "Address already in use" in done.stderr


def test_rdma_cm_of_a_software_device() -> None:
    done = ask("ping", "127.0.0.1", "--transport", "rdmacm")
    assert done.returncode == 4
    assert 'pass transport="tcp"' in done.stderr


# ---- Command lines


NO_COMMAND_LINES = [
    (["host", "--count", "0"], "0 is not in the range"),
    (["host", "--size", "7"], "7 is not in the range"),
    (["host", "--interval", "-1"], "-1"),
    (["host", "--interval", "inf"], "inf is no number of seconds"),
    (["host", "--timeout", "nan"], "nan is no number of seconds"),
    (["host", "--timeout", "0"], "0.0 is not in the range"),
    (["host", "--verb", "shout"], "'shout' is not one of"),
    (["host", "--message-model", "fast"], "'fast' is not one of"),
    (["host", "another"], "unexpected extra argument"),
    (["host:0"], "a port is from 1 to 65535"),
    (["host:65536"], "a port is from 1 to 65535"),
    (["host:"], "a port is from 1 to 65535"),
    (["host:http"], "'http' is none"),
    ([":7471"], "a peer is as HOST"),
    (["[::1"], "a peer is as HOST"),
    (["[::1]7471"], "a peer is as HOST"),
    (["[]:1"], "a peer is as HOST"),
    ([""], "a peer is as HOST"),
    (["[::1]:"], "a port is from 1 to 65535"),
    (["serve", "--port", "65536"], "65536 is not in the range"),
]


def test_what_is_no_command_line() -> None:
    for arguments, said in NO_COMMAND_LINES:
        done = CliRunner().invoke(main.main, ["ping", *arguments])
        assert done.exit_code == 2, arguments
        assert said in done.stderr


ADDRESSES = [
    ("host", ("host", 7471)),
    ("host:1", ("host", 1)),
    ("::1", ("::1", 7471)),
    ("[::1]", ("::1", 7471)),
    ("[::1]:99", ("::1", 99)),
    ("10.0.0.1:65535", ("10.0.0.1", 65535)),
]


def test_addresses() -> None:
    assert [(text, ping._address(text)) for text, _ in ADDRESSES] == ADDRESSES


def test_the_command_line_has_what_there_is() -> None:
    assert [ping._model(name) for name in ping.MODELS] == [MessageModel.DEFAULT, *LOW, MessageModel.HIGH_BANDWIDTH]
    assert len(ping.MODELS) == len(MessageModel)
    assert (ping.SMALLEST, ping.LARGEST) == (SMALLEST, LARGEST)
    options = {each.name: each.type for each in ping.to.params}
    assert tuple(getattr(options["verb"], "choices")) == get_args(Verb)  # noqa: B009
    assert set(getattr(options["transport"], "choices")) == set(get_args(Transport))  # noqa: B009


# ---- Requests


@pytest.mark.parametrize("verb", get_args(Verb))
def test_a_request_arrives(verb: Verb) -> None:
    request = PingRequest(verb, 4096)
    assert PingRequest.parse(request.pack()) == request


NO_REQUESTS = [
    (b"", "no JSON"),
    (b"[" * 900, "no JSON"),
    (b"\xff", "no JSON"),
    (b"[]", "no object"),
    (b" " * 1001, "1,001 bytes are no request"),
    (b"{}", "no request of its version"),
    (b'{"aioverbs-ping": 2, "verb": "send", "size": 64}', "no request of its version"),
    (b'{"aioverbs-ping": 1, "verb": "send"}', "this one 'verb'"),
    (b'{"aioverbs-ping": 1}', "this one nothing"),
    (b'{"aioverbs-ping": 1, "verb": "send", "size": 64, "more": 1}', "'more'"),
    (b'{"aioverbs-ping": 1, "verb": ["send"], "size": 64}', "not by"),
    (b'{"aioverbs-ping": 1, "verb": "send", "size": true}', "True is none"),
    (b'{"aioverbs-ping": 1, "verb": "send", "size": 64.0}', "64.0 is none"),
    (b'{"aioverbs-ping": 1, "verb": "read", "size": 1000000000000}', "from 8 to 67,108,864 bytes"),
    (b'{"aioverbs-ping": 1, "verb": "read", "size": -1}', "from 8 to"),
]


def test_what_is_no_request() -> None:
    for message, said in NO_REQUESTS:
        with pytest.raises(ValueError, match=said):
            PingRequest.parse(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["send", "read", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["aioverbs-ping", "verb", "size", "refused"]), inner)
    ),
)
ALIKE = st.fixed_dictionaries({"aioverbs-ping": st.just(1), "verb": JSON, "size": JSON})


@given(st.binary() | (JSON | ALIKE).map(json.dumps).map(str.encode))
def test_any_message_is_a_request_or_none(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        request = PingRequest.parse(message)
        assert PingRequest.parse(request.pack()) == request
    with contextlib.suppress(PingRefusedError):
        check_answer(message)


def test_a_refusal() -> None:
    with pytest.raises(PingRefusedError, match="the server refuses: too much"):
        check_answer(refused("too much"))
    with pytest.raises(PingRefusedError, match="the server refuses: ééé"):
        check_answer(refused("é" * 5000))
