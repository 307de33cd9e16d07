"""RDMA for asyncio: devices, and the domains that keep what is made on them to one event loop and its thread.

`__init__.pyi` lists the public names. Each is imported when it is first used, and the compiled core (`aioverbs._core`,
private) with the first that needs it, so that importing the package costs next to nothing.
"""

from importlib import import_module

from aioverbs._exports import DEFINED_IN

__all__ = sorted(DEFINED_IN)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # here, because it costs more than the package itself

        return version("aioverbs")
    if name not in DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
