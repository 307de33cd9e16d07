"""The check that a cluster does not require encryption."""

from collections.abc import Mapping

from aioverbs.distributed.comm import PREFIX

__all__ = ["check_encryption"]


def check_encryption(address: str, connection_args: Mapping[str, object]) -> None:
    """Check that the configuration of Dask does not require encryption.

    :param address: address without its scheme.
    :param connection_args: arguments that `distributed` made from its `distributed.Security`.
    :raises RuntimeError: encryption is required.
    """
    if connection_args.get("require_encryption"):
        raise RuntimeError(
            f"encryption required by Dask configuration, refusing communication from/to {PREFIX + address!r}: messages "
            'go from device to device unencrypted; use the protocol "tls", or do not set '
            "`distributed.comm.require-encryption`"
        )
