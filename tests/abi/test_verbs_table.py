"""Verbs exported by verbs_ops.h have the types that <infiniband/verbs.h> declares."""

import re
import subprocess
from pathlib import Path

import pytest

from .comparison import compiler
from .test_verbs_abi import require_reference

TABLE = Path(__file__).parents[2] / "aioverbs" / "_core" / "abi" / "verbs_ops.h"


def refused(listed: str) -> set[str]:
    """Return the verbs whose types differ from the installed header, according to the compiler."""
    source = f"""
        #include <infiniband/verbs.h>
        #include <stddef.h>
        {listed}
        #define SAME(function, pointer) \\
            _Static_assert(__builtin_types_compatible_p(__typeof__(&function), __typeof__(pointer)), #function);
        SAME(_ibv_query_gid_table, ((struct pointers *)0)->query_gid_table)
        #define X(result, name, parameters) \\
            typedef result declared_##name parameters; \\
            _Static_assert(__builtin_types_compatible_p(__typeof__(ibv_##name), declared_##name), "ibv_" #name);
        VERBS_EXPORTED(X)
        VERBS_DEVICES(X)
    """
    command = [*compiler(), "-std=c11", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    found = set(re.findall(r'"_?ibv_(\w+)"', "\n".join(re.findall(r"error:.*", done.stderr))))
    assert bool(found) == bool(done.returncode), done.stderr
    return found


@pytest.fixture(scope="module")
def listed() -> str:
    require_reference()
    text = TABLE.read_text()
    found = re.findall(r"#define VERBS_(?:EXPORTED|DEVICES)\(X\)(?:.*\\\n)+.*\n", text)
    pointer = re.search(r"ssize_t \(\*query_gid_table\)[^;]*;", text)
    assert len(found) == 2
    assert pointer
    return f"{''.join(found)}struct pointers {{ {pointer.group()} }};"


def test_every_verb_has_the_declared_type(listed: str) -> None:
    assert refused(listed) == set()


@pytest.mark.parametrize(
    ("before", "after", "verb"),
    [
        ("import_pd, (struct ibv_context *, uint32_t handle)", "import_pd, (struct ibv_context *, int)", "import_pd"),
        ("X(void, unimport_pd", "X(int, unimport_pd", "unimport_pd"),
        ("import_device, (int cmd_fd)", "import_device, (void)", "import_device"),
        ("open_device, (struct ibv_device *", "open_device, (const struct ibv_device *", "open_device"),
        ("uint32_t flags", "uint64_t flags", "query_gid_table"),
        ("reg_mr, (struct ibv_pd *, void *, size_t", "reg_mr, (struct ibv_pd *, void *, int", "reg_mr"),
    ],
    ids=["parameter", "result", "missing parameter", "constant", "flags", "size"],
)
def test_a_different_type_is_noticed(listed: str, before: str, after: str, verb: str) -> None:
    assert listed.count(before) == 1
    assert refused(listed.replace(before, after)) == {verb}
