"""Names that `aioverbs` exports, and the ``__module__`` of exported objects.

`__init__.pyi` lists each public name and the module that defines it. Objects in that list have ``aioverbs`` as their
``__module__``, however they were imported, so that representations, tracebacks and pickles name the public module. For
objects that only another public module exports, such as `aioverbs.rdma_cm` or `aioverbs.attributes`, ``__module__`` is
that module; for all others, it is the module that defines them.
"""

import sys

__all__ = ["DEFINED_IN", "defined_in", "publish"]


def _read() -> dict[str, str]:
    """Return a dict from each exported name to the module that defines it, read from `__init__.pyi`.

    `ast` is not used, because importing it takes longer than everything else here.
    """
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
    """Return the names that `aioverbs` exports and that a module defines, as a list.

    :param module: full name of the module, such as ``"aioverbs.errors"``.
    """
    return [name for name, definer in DEFINED_IN.items() if definer == module]


def publish(module: str) -> None:
    """Set ``__module__`` to ``aioverbs`` for all exported objects that a module defines. Each module calls this at its
    end.

    Also remove the ``__firstlineno__`` of classes (Python 3.13.0; in later releases the assignment does that itself):
    it would be taken for a line of the public module's file, although it is a line of the defining one.

    :param module: full name of the calling module, its ``__name__``.
    :raises KeyError: `__init__.pyi` lists a name that the module does not define.
    """
    for name in defined_in(module):
        value = vars(sys.modules[module])[name]
        value.__module__ = "aioverbs"
        if "__firstlineno__" in getattr(value, "__dict__", ()):
            del value.__firstlineno__
