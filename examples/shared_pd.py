"""A protection domain shared by two contexts: queue pairs of one use memory that the other registered.

Uses an RDMA device if there is one, otherwise the software device; AIOVERBS_DEVICE selects another device. Not all
devices support shared protection domains.
"""

import asyncio
import errno
import sys

import aioverbs
from aioverbs import AccessFlags

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
KEY = 0x5EC2E7  # 64-bit secret known to both


async def main() -> None:
    async with (
        aioverbs.open_device() as device,
        aioverbs.open_device() as other,
        device.protection_domain() as pd,
        pd.share(KEY) as shared,
        other.shared_protection_domain(shared.id, KEY) as instance,
        instance.register(bytearray(b"hello" + bytes(59)), ACCESS) as region,
        device.resource_domain(pd) as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        await near.write(region[:5], region.remote()[32:37])
        print(f"written by one context, registered by the other: {bytes(region.buffer[32:37])!r}")
        try:
            await other.shared_protection_domain(shared.id, KEY + 1).open()
        except aioverbs.VerbsError as error:
            print(f"with another key: {error}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except aioverbs.VerbsError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        sys.exit(f"{error}; AIOVERBS_DEVICE=soft0 can")
