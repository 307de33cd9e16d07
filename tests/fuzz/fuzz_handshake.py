"""Fuzz the handshake and the messages of a connection: arbitrary bytes are accepted or rejected.

python tests/fuzz/fuzz_handshake.py -max_total_time=30 CORPUS
"""

import sys
from pathlib import Path

import atheris

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

with atheris.instrument_imports(include=["aioverbs"]):
    from aioverbs._connection.handshake import Handshake, MessageType, Offer, encode_reject, parse
    from aioverbs._connection.wire import GrantNotice, header, parse_header
    from aioverbs._verbs.endpoint import Endpoint
    from aioverbs.errors import HandshakeError
    from aioverbs.types import Mtu

OFFER = Offer(Endpoint(bytes(15) + b"\1", 5, 6, Mtu.MTU_1024), 4096, 16, 1 << 20)


def listener_before(secret: bytes | None, greeted: bool) -> Handshake:
    """Return the state machine of a listener that expects a HELLO, or an OFFER."""
    listener = Handshake(False, b"\1" * 16, secret)
    if greeted:
        listener.receive_hello(Handshake(True, b"\2" * 16, secret).hello())
        listener.hello()
    return listener


def one_input(data: bytes) -> None:
    """Check one input of libFuzzer."""
    for secret in (None, b"secret"):
        for listener, receive in (
            (listener_before(secret, False), Handshake.receive_hello),
            (listener_before(secret, True), Handshake.receive_offer),
            (listener_before(secret, True), Handshake.receive_ready),
        ):
            try:
                result = receive(listener, data)
            except HandshakeError as error:
                if parse(encode_reject(error))[0] is not MessageType.REJECT:
                    raise AssertionError("a message that rejects the peer was not parsed as one") from error
            else:
                if isinstance(result, Offer) and (
                    secret is not None or Offer.parse_body(result.pack(), 0)[0] != result
                ):
                    raise AssertionError(f"{data!r} was parsed as an offer")
    try:
        notice = GrantNotice.parse(data)
    except ValueError:
        pass
    else:
        if notice.pack() != data:
            raise AssertionError(f"{data!r} was parsed as {notice}")
    immediate = int.from_bytes(data[:4])
    kind, flags, returned, number = parse_header(immediate)
    if kind << 29 | flags | returned << 16 | number != immediate:
        raise AssertionError(f"{immediate:#x} was split incorrectly")


def seeds(folder: Path) -> None:
    """Write the messages of honest peers as the initial corpus."""
    near, listener = Handshake(True, b"\2" * 16), listener_before(None, False)
    messages = [near.hello()]
    listener.receive_hello(messages[0])
    messages.append(listener.hello())
    near.receive_hello(messages[1])
    messages += [near.offer(OFFER), near.ready(), encode_reject(HandshakeError(1, "text"))]
    messages += [GrantNotice(4096, 64, 7, 2).pack(), header(1).to_bytes(4)]  # type: ignore[arg-type]
    for index, data in enumerate(messages):
        (folder / f"seed{index}").write_bytes(data)


if __name__ == "__main__":
    seeds(Path(sys.argv[-1]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
