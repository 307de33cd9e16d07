"""RDMA for asyncio: devices, resource domains, queue pairs, connections and worker pools.

`__init__.pyi` lists the public names. Each is imported at its first use, and the compiled core (`aioverbs._core`,
private) with the first name that needs it, so that importing the package itself is cheap.
"""

from importlib import import_module

from aioverbs._exports import DEFINED_IN

__all__ = sorted(DEFINED_IN)


def __getattr__(name: str) -> object:
    """Return a public name, and import the module that defines it.

    :raises AttributeError: there is no such name.
    :raises ImportError: the compiled core is missing.
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
