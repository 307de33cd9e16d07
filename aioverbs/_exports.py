"""Names that `aioverbs` exports, and the ``__module__`` of exported objects.

`__init__.pyi` lists each public name and the module that defines it. Objects in that list have ``aioverbs`` as their
``__module__``, however they were imported, so representations, tracebacks and pickles name the public module. Objects
that only another public module has, such as `aioverbs.rdma_cm` or `aioverbs.attributes`, have that module; all others
have the module that defines them.
"""

import sys

__all__ = ["DEFINED_IN", "defined_in", "publish"]


def _read() -> dict[str, str]:
    """Return the exported names and the module that defines each, from `__init__.pyi`.

    `ast` is not used: importing it takes longer than all the rest.
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
    """Return the exported names that a module defines."""
    return [name for name, definer in DEFINED_IN.items() if definer == module]


def publish(module: str) -> None:
    """Set ``__module__`` to ``aioverbs`` for all exported objects of a module. Called at the end of each module.

    Not assigned in the class bodies: from Python 3.13 on an assignment there removes ``__firstlineno__``, which would
    be the line of another file.

    :param module: name of the calling module.
    """
    for name in defined_in(module):
        vars(sys.modules[module])[name].__module__ = "aioverbs"
