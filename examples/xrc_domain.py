"""An XRC domain opened by two contexts, which find it by the inode of a file.

Uses an RDMA device if there is one, otherwise the software device; AIOVERBS_DEVICE selects another device. Not all
devices support XRC domains.
"""

import asyncio
import errno
import os
import sys
import tempfile

import aioverbs


async def main() -> None:
    with tempfile.TemporaryFile() as file:
        fd = file.fileno()
        async with aioverbs.open_device() as device, aioverbs.open_device() as other:
            async with device.xrc_domain(fd, os.O_CREAT | os.O_EXCL), other.xrc_domain(fd, 0):
                print("opened by two contexts")
                try:
                    await device.xrc_domain(fd, os.O_CREAT | os.O_EXCL).open()
                except aioverbs.VerbsError as error:
                    print(f"O_EXCL: {error}")
            try:
                await other.xrc_domain(fd, 0).open()
            except aioverbs.VerbsError as error:
                print(f"removed with its last reference: {error}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except aioverbs.VerbsError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        sys.exit(f"{error}; AIOVERBS_DEVICE=soft0 has them")
