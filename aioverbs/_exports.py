"""The names that `aioverbs` exports, and what is exported says of where it is.

`__init__.pyi` is the list: each public name, and the module that defines it. Whatever is in it says ``aioverbs`` for
its module, wherever it was imported from: in representations, tracebacks and pickles. What only a public module beside
that has (`aioverbs.rdma_cm`, `aioverbs.attributes`) says that one; all else says the module that defines it.
"""

import sys

__all__ = ["DEFINED_IN", "defined_in", "publish"]


def _read() -> dict[str, str]:
    """Each name, and the module that defines it: without a parser, which would take longer than all the rest."""
    found, module = {}, ""
    with open(__file__.removesuffix("_exports.py") + "__init__.pyi", encoding="utf-8") as stub:
        for line in stub:
            match line.split():
                case ["from", module, "import", "("]:
                    pass
                case [name, "as", _]:
                    found[name] = module
    return found


DEFINED_IN = _read()


def defined_in(module: str) -> list[str]:
    """The exported names that a module defines."""
    return [name for name, definer in DEFINED_IN.items() if definer == module]


def publish(module: str) -> None:
    """Have what a module defines and `aioverbs` exports say so. A module calls this at its end, with its name.

    At its end, and not in the bodies of classes: from Python 3.13 on, assigning takes away the line that a class is
    said to begin at, which would be one of another file now.
    """
    for name in defined_in(module):
        vars(sys.modules[module])[name].__module__ = "aioverbs"
