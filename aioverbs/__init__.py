"""RDMA for asyncio: devices, and the domains that keep what is made on them to one event loop and its thread.

`__init__.pyi` lists the public names. Each is imported when it is first used, and the compiled core (`aioverbs._core`,
private) with the first that needs it, so that importing the package costs next to nothing.
"""

import ast
from importlib import import_module
from pathlib import Path

_MODULE_OF = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_bytes()).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # here, because it costs more than the package itself

        return version("aioverbs")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
