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
        #define X(result, name, parameters) \\
            typedef result declared_##name parameters; \\
            _Static_assert(__builtin_types_compatible_p(__typeof__(ibv_##name), declared_##name), "ibv_" #name);
        VERBS_EXPORTED(X)
    """
    command = [*compiler(), "-std=c11", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    found = set(re.findall(r'"ibv_(\w+)"', "\n".join(re.findall(r"error:.*", done.stderr))))
    assert bool(found) == bool(done.returncode), done.stderr
    return found


@pytest.fixture(scope="module")
def listed() -> str:
    require_reference()
    found = re.search(r"#define VERBS_EXPORTED\(X\)(?:.*\\\n)+.*\n", TABLE.read_text())
    assert found
    return found.group()


def test_every_verb_has_the_declared_type(listed: str) -> None:
    assert refused(listed) == set()


@pytest.mark.parametrize(
    ("before", "after", "verb"),
    [
        ("import_pd, (struct ibv_context *, uint32_t handle)", "import_pd, (struct ibv_context *, int)", "import_pd"),
        ("X(void, unimport_pd", "X(int, unimport_pd", "unimport_pd"),
        ("import_device, (int cmd_fd)", "import_device, (void)", "import_device"),
        ("reg_mr, (struct ibv_pd *, void *, size_t", "reg_mr, (struct ibv_pd *, void *, int", "reg_mr"),
    ],
    ids=["parameter", "result", "missing parameter", "size"],
)
def test_a_different_type_is_noticed(listed: str, before: str, after: str, verb: str) -> None:
    assert listed.count(before) == 1
    assert refused(listed.replace(before, after)) == {verb}
