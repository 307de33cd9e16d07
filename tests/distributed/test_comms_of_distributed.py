"""The checks that `distributed` makes of each of its comm backends, made of this one.

They are in the repository of `distributed` only, not in its wheel. `nox -s distributed -- CHECKOUT` copies them into
the installed package and runs this file; elsewhere it is skipped.
"""

from typing import Any

import pytest
from distributed.utils import get_ip, open_port
from distributed.utils_test import has_ipv6

checks: Any = pytest.importorskip("distributed.comm.tests.test_comms", reason="a wheel of distributed has no tests")

requires_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("address", "listening", "contact"),
    [
        ("127.0.0.1", ("127.0.0.1",), None),
        ("127.0.0.1:PORT", ("127.0.0.1",), None),
        ("0.0.0.0", ("0.0.0.0",), (get_ip(),)),
        ("0.0.0.0:PORT", ("0.0.0.0",), (get_ip(),)),
        ("", ("0.0.0.0",), (get_ip(),)),
        (":PORT", ("0.0.0.0",), (get_ip(),)),
        pytest.param("[::1]", ("::1",), None, marks=requires_ipv6),
        pytest.param("[::1]:PORT", ("::1",), None, marks=requires_ipv6),
    ],
)
async def test_clients_and_a_server(address: str, listening: tuple[str], contact: tuple[str] | None) -> None:
    port = (open_port(),) if "PORT" in address else ()
    check_contact = checks.tcp_eq(*contact, *port) if contact is not None else None
    address = f"aioverbs://{address.replace('PORT', str(*port))}"
    await checks.check_client_server(address, checks.tcp_eq(*listening, *port), check_contact)


@pytest.mark.parametrize(
    "check",
    [
        "check_comm_closed_implicit",
        "check_comm_closed_explicit",
        "check_many_listeners",
        "check_deserialize",
        "check_deserialize_roundtrip",
        "check_deserialize_eoferror",
    ],
)
async def test_check(check: str) -> None:
    await getattr(checks, check)("aioverbs://127.0.0.1")


async def test_connecting_to_a_port_without_a_listener_ends_in_time() -> None:
    await checks.check_connect_timeout("aioverbs://127.0.0.1:44444")


@pytest.mark.parametrize("check", ["check_repr", "check_addresses"])
async def test_check_of_two_ends(check: str) -> None:
    await getattr(checks, check)(*await checks.get_comm_pair("aioverbs://127.0.0.1"))
