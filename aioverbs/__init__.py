"""RDMA for asyncio: devices, resource domains, queue pairs, connections and worker pools.

`__init__.pyi` lists the public names. ``import aioverbs`` imports all modules that define them, and the compiled core
(`aioverbs._core`, private), so that an event loop does not wait for imports when it first opens a device or connects.
"""

import contextlib
from importlib import import_module

from aioverbs._exports import DEFINED_IN

__all__ = sorted(DEFINED_IN)


def __getattr__(name: str) -> object:
    """Return a public name, and import the module that defines it.

    :raises AttributeError: there is no such name.
    :raises ImportError: the compiled core is missing or cannot be loaded.
    """
    if name == "__version__":
        from importlib.metadata import version  # imported here, because it takes longer than the package itself

        return version("aioverbs")
    if name not in DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


# Without the compiled core, the first use of a public name raises the exception: `aioverbs doctor` explains it.
with contextlib.suppress(ImportError):
    for _module in (*dict.fromkeys(DEFINED_IN.values()), "anyio._backends._asyncio"):  # anyio imports it when needed
        import_module(_module)
