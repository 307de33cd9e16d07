"""The compiled core: the ABI, handles, the data path, allocators, and the software device.

The software device is imported first, no matter which module is wanted: `fork` takes the locks in the reverse of the
order in which they were registered for it, and a thread takes locks of allocators before locks of the device
(``soft/base/lock_order.h``).
"""

import aioverbs._core.software.software  # noqa: F401
