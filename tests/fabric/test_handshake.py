"""What users are told where the two ends speak different versions of the protocol, by somebody who speaks by hand.

The messages are made from what aioverbs/_docs/protocol.md says, and not by the code that the device has for them.
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

OTHER = 2
MAGIC = b"aioverbs"
HEAD = struct.Struct("<8sHHI")  # magic, version, flags; of a WELCOME: refused
WELCOME_SIZE = 112
REFUSED_VERSION = 1
PROBLEM = "the peer speaks protocol version 2, not 1: use the same release of aioverbs on both sides"


async def test_a_peer_that_connects_with_another_version_is_told(short_path: Path) -> None:
    async with end() as here:
        (qp,) = here.qps
        qp.connect(Endpoint(os.urandom(16), 17, 0, Mtu.MTU_4096), AccessFlags.LOCAL_WRITE)  # so it can be found
        reader, writer = await asyncio.open_unix_connection(short_path / qp.local_endpoint().gid.hex())
        async with asyncio.timeout(patience(20)):
            writer.write(HEAD.pack(MAGIC, OTHER, 0, 0))
            answer = await reader.read()  # until it is closed
        writer.close()
        assert len(answer) == WELCOME_SIZE
        assert HEAD.unpack_from(answer) == (MAGIC, 1, 0, REFUSED_VERSION)
        assert here.device.refusals()[-1].reason == PROBLEM


async def test_the_user_is_told_of_a_peer_with_another_version(short_path: Path) -> None:
    gid = os.urandom(16)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readexactly(HEAD.size)).startswith(MAGIC)
        writer.write(HEAD.pack(MAGIC, OTHER, 0, 0))
        await reader.read()
        writer.close()

    async with end() as here, await asyncio.start_unix_server(answer, short_path / gid.hex()):
        (qp,) = here.qps
        qp.connect(Endpoint(gid, 17, 0, Mtu.MTU_4096), AccessFlags.LOCAL_WRITE, timeout=14, retry_cnt=2)
        with pytest.raises(WorkCompletionError, match="RETRY_EXC"):
            await qp.send(here.region[:8])
        await until(lambda: any(peer.problem == PROBLEM for peer in here.device.peers()))


def test_the_documented_layout_is_the_one_that_is_spoken() -> None:
    """Each field of the tables stands where the code has it, and each has its row."""
    code = (ROOT / "aioverbs" / "_core" / "soft" / "fabric" / "handshake_wire.c").read_text()
    spoken = {name: int(at) for name, at in re.findall(r"^    ((?:\w+_)?AT_\w+) = (\d+),$", code, re.MULTILINE)}
    page = (ROOT / "aioverbs" / "_docs" / "protocol.md").read_text()
    for message in ("HELLO", "WELCOME", "PROOF"):
        table = page.partition(f"### {message}\n")[2].partition("\n#")[0]
        rows = re.findall(r"^\| (\d+) \| \d+ \| `(\w+)` \|", table, re.MULTILINE)
        own = {name.partition("AT_")[2]: at for name, at in spoken.items() if name.startswith(message)}
        begin = {"MAGIC"} if message == "PROOF" else {"MAGIC", "VERSION", "FLAGS", "GIDS"}
        common = {name: spoken[f"AT_{name}"] for name in begin}
        assert {name.upper(): int(at) for at, name in rows} == common | own
