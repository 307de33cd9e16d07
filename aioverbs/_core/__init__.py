"""The compiled core: the ABI, handles, the data path, allocators, and the software device.

The software device comes first, whichever of them is wanted: `fork` takes locks in the reverse order in which they are
watched over it, and a thread takes those of allocators before those of the device (``soft/base/lock_order.h``).
"""

import aioverbs._core.software.software  # noqa: F401
