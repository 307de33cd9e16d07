"""Libraries in place of libibverbs that lack verbs, as those of older releases do."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.abi.comparison import compiler

pytestmark = pytest.mark.toolchain

TABLE = Path(__file__).parents[2] / "aioverbs" / "_core" / "abi" / "verbs_ops.h"
SINCE_31 = {"ibv_import_device", "ibv_import_pd", "ibv_unimport_pd"}
SINCE_32 = {"_ibv_query_gid_table"}

USE = """
import ctypes, json, os
from aioverbs import VerbsError, LibraryNotFoundError
from aioverbs._core.handles import handles
try:
    handles.table_slot("reg_mr")
except LibraryNotFoundError as error:
    print(json.dumps({"outdated": error.outdated, "text": str(error)}))
else:
    query = ctypes.c_void_p.from_address(handles.table_slot("query_gid_table")).value
    queried = ctypes.CFUNCTYPE(ctypes.c_ssize_t)(query)()
    try:
        handles.Context.import_device(os.open("/dev/null", os.O_RDONLY))
    except VerbsError as error:
        print(json.dumps({"import": error.errno, "query": -queried}))
"""


def library_without(lacking: set[str], folder: Path) -> Path:
    """Compile a libibverbs.so.1 that exports all verbs but those in `lacking`; none can be called."""
    listed = re.findall(r"#define VERBS_(?:EXPORTED|DEVICES)\(X\)(?:.*\\\n)+.*\n", TABLE.read_text())
    exported = {f"ibv_{name}" for name in re.findall(r"X\([^,()]+, (\w+),", "".join(listed))} | SINCE_32
    assert lacking < exported
    library = folder / "libibverbs.so.1"
    source = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in exported - lacking)
    command = [*compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


def run_with(folder: Path, *arguments: str) -> str:
    """Run Python where the library in a folder is found before the system's, and return its output."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False).stdout


def test_before_imports_and_queries_of_the_gid_table(tmp_path: Path) -> None:
    library_without(SINCE_31 | SINCE_32, tmp_path)
    assert json.loads(run_with(tmp_path, "-c", USE)) == {"import": errno.EOPNOTSUPP, "query": errno.EOPNOTSUPP}


def test_without_a_verb_that_every_release_has(tmp_path: Path) -> None:
    library = library_without({"ibv_reg_mr"}, tmp_path)
    found = json.loads(run_with(tmp_path, "-c", USE))
    assert found["outdated"]
    assert found["text"].startswith("libibverbs.so.1 is too old: install rdma-core 44 or newer (")
    assert "ibv_reg_mr" in found["text"]
    result = json.loads(run_with(tmp_path, "-m", "aioverbs.cli", "doctor", "--json"))
    (finding,) = (each for each in result["findings"] if each["code"].startswith("libibverbs"))
    assert (finding["code"], finding["commands"]) == ("libibverbs-old", [])
    assert finding["message"].startswith(str(library))
