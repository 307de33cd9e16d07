"""Error reports when the two ends speak different versions of the protocol.

The peer's messages are built from aioverbs/_docs/protocol.md rather than with the device's own code.
"""

import asyncio
import os
import re
import struct
from pathlib import Path

import pytest

from aioverbs import AccessFlags, Endpoint, Mtu, WorkCompletionError
from tests.conftest import ROOT
from tests.fabric.two import end
from tests.pace import patience
from tests.waiting import until

VERSION = 3
OTHER_VERSION = VERSION + 1
MAGIC = b"aioverbs"
HEAD = struct.Struct("<8sHHI")  # magic, version, flags; in a WELCOME also: refused
WELCOME_SIZE = 112
REFUSED_VERSION = 1
PROBLEM = (
    f"the peer speaks protocol version {OTHER_VERSION}, not {VERSION}: use the same release of aioverbs on both sides"
)


async def test_a_connecting_peer_with_another_version_gets_the_reason(short_path: Path) -> None:
    async with end() as here:
        (qp,) = here.qps
        # Connected to make the device findable.
        qp.connect(Endpoint(os.urandom(16), 17, 0, Mtu.MTU_4096), AccessFlags.LOCAL_WRITE)
        reader, writer = await asyncio.open_unix_connection(short_path / qp.local_endpoint().gid.hex())
        async with asyncio.timeout(patience(20)):
            writer.write(HEAD.pack(MAGIC, OTHER_VERSION, 0, 0))
            answer = await reader.read()  # until the device closes the stream
        writer.close()
        assert len(answer) == WELCOME_SIZE
        assert HEAD.unpack_from(answer) == (MAGIC, VERSION, 0, REFUSED_VERSION)
        assert here.device.refusals()[-1].reason == PROBLEM


async def test_a_version_mismatch_is_reported_to_the_user(short_path: Path) -> None:
    gid = os.urandom(16)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readexactly(HEAD.size)).startswith(MAGIC)
        writer.write(HEAD.pack(MAGIC, OTHER_VERSION, 0, 0))
        await reader.read()
        writer.close()

    async with end() as here, await asyncio.start_unix_server(answer, short_path / gid.hex()):
        (qp,) = here.qps
        qp.connect(Endpoint(gid, 17, 0, Mtu.MTU_4096), AccessFlags.LOCAL_WRITE, timeout=14, retry_cnt=2)
        with pytest.raises(WorkCompletionError, match="RETRY_EXC"):
            await qp.send(here.region[:8])
        await until(lambda: any(peer.problem == PROBLEM for peer in here.device.peers()))


def test_the_documented_layout_matches_the_code() -> None:
    """The documented fields are those of the code, and have the same offsets."""
    code = (ROOT / "aioverbs" / "_core" / "soft" / "fabric" / "handshake_wire.c").read_text()
    offsets = {name: int(at) for name, at in re.findall(r"^    ((?:\w+_)?AT_\w+) = (\d+),$", code, re.MULTILINE)}
    page = (ROOT / "aioverbs" / "_docs" / "protocol.md").read_text()
    for message in ("HELLO", "WELCOME", "PROOF"):
        table = page.partition(f"### {message}\n")[2].partition("\n#")[0]
        rows = re.findall(r"^\| (\d+) \| \d+ \| `(\w+)` \|", table, re.MULTILINE)
        own_fields = {name.partition("AT_")[2]: at for name, at in offsets.items() if name.startswith(message)}
        first_fields = {"MAGIC"} if message == "PROOF" else {"MAGIC", "VERSION", "FLAGS", "GIDS"}
        common = {name: offsets[f"AT_{name}"] for name in first_fields}
        assert {name.upper(): int(at) for at, name in rows} == common | own_fields
