"""librdmacm.h agrees with <rdma/rdma_cma.h>, and the comparison notices edits."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .comparison import compiler

HEADER = Path(__file__).parents[2] / "aioverbs" / "_core" / "abi" / "librdmacm.h"
TABLE = HEADER.with_name("cm_ops.h")
REFERENCE = "#include <rdma/rdma_cma.h>\n"
PACKAGE_LINE = "no <rdma/rdma_cma.h>: apt-get install librdmacm-dev"

# Structures allocated by librdmacm; librdmacm.h declares them up to the last member that aioverbs reads.
PARTLY = {"struct rdma_cm_id", "struct rdma_cm_event"}
PARTIAL = ("struct rdma_cm_event", "param")  # set for datagrams only
UNIONS = {
    "struct rdma_addr": ["src_addr", "src_sin", "src_sin6", "dst_addr", "dst_sin", "dst_sin6"],
    "struct rdma_cm_event": ["param.conn"],
}


@pytest.fixture(scope="module")
def ours() -> str:
    done = subprocess.run([*compiler(), "-E", "-x", "c", "-"], input=REFERENCE, capture_output=True, text=True)
    if done.returncode:
        if "CI" in os.environ:
            pytest.fail(PACKAGE_LINE)
        pytest.skip(PACKAGE_LINE)
    return HEADER.read_text()


def _without_unions(body: str) -> str:
    """Replace unions by their names; remove unnamed ones."""
    return re.sub(
        r"union \{.*?\n    \}( \w+)?;", lambda union: f"int{union[1]};" if union[1] else "", body, flags=re.DOTALL
    )


def expressions(header: str) -> list[str]:
    """Return C expressions that define the ABI: values of constants, offsets and sizes."""
    found = re.findall(r"^    (RDMA_\w+)", header, re.MULTILINE)
    for name, body in re.findall(r"^(struct \w+) \{\n(.*?)^\};", header, re.MULTILINE | re.DOTALL):
        members = [*re.findall(r"(\w+)(?:\[\d+\])?;$", _without_unions(body), re.MULTILINE), *UNIONS.get(name, [])]
        found += [f"offsetof({name}, {member})" for member in members]
        found += [f"size_of_member({name}, {member})" for member in members if (name, member) != PARTIAL]
        found += [] if name in PARTLY else [f"sizeof({name})"]
    return found


def values(include: str, constants: list[str], folder: Path) -> list[int]:
    prints = "\n".join(f"print({each});" for each in constants)
    program = f"""
        #include <stddef.h>
        #include <stdio.h>
        {include}
        #define size_of_member(type, member) sizeof(((type *)0)->member)
        #define print(value) printf("%zu ", (size_t)(value))
        int main(void)
        {{
            {prints}
            return 0;
        }}
    """
    binary = folder / "program"
    command = [*compiler(), "-std=gnu11", f"-I{HEADER.parents[1]}", "-o", str(binary), "-x", "c", "-"]
    subprocess.run(command, input=program, text=True, check=True)
    return [int(each) for each in subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()]


def differences(header: str, folder: Path) -> set[str]:
    (folder / "changed.h").write_text(header)
    constants = expressions(header)
    mine = values(f'#include "{folder}/changed.h"', constants, folder)
    theirs = values(REFERENCE, constants, folder)
    return {name for name, one, other in zip(constants, mine, theirs, strict=True) if one != other}


def test_agrees_with_the_installed_header(ours: str, tmp_path: Path) -> None:
    constants = expressions(ours)
    assert {
        "RDMA_CM_EVENT_TIMEWAIT_EXIT",
        "RDMA_PS_TCP",
        "offsetof(struct rdma_cm_id, port_num)",
        "offsetof(struct rdma_cm_event, param)",
        "offsetof(struct rdma_addr, addr)",
        "sizeof(struct rdma_conn_param)",
    } <= set(constants)
    assert not differences(ours, tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        ("    RDMA_CM_EVENT_REJECTED,\n", "", "RDMA_CM_EVENT_ESTABLISHED"),
        ("    void *context;\n", "", "offsetof(struct rdma_cm_id, qp)"),
        ("    int num_paths;\n", "    int num_paths[3];\n", "sizeof(struct rdma_route)"),
        ("    uint8_t srq;\n", "    uint32_t srq;\n", "size_of_member(struct rdma_conn_param, srq)"),
        ("        struct sockaddr_storage dst_storage;\n", "", "sizeof(struct rdma_addr)"),
        (
            "    uint8_t responder_resources;\n    uint8_t initiator_depth;\n",
            "    uint8_t initiator_depth;\n    uint8_t responder_resources;\n",
            "offsetof(struct rdma_conn_param, initiator_depth)",
        ),
    ],
)
def test_an_edit_is_noticed(ours: str, tmp_path: Path, before: str, after: str, reported: str) -> None:
    assert ours.count(before) == 1
    assert reported in differences(ours.replace(before, after), tmp_path)


def test_the_functions_are_those_of_the_header(ours: str, tmp_path: Path) -> None:
    """The function of the same name can be assigned to each pointer of the table without a cast."""
    listed = TABLE.read_text()
    macro = listed[listed.index("#define RDMA_CM_EXPORTED") : listed.index("struct rdma_cm_table")]
    program = f"""
        {REFERENCE}
        {macro}
        #define X(result, name, parameters) result (*ours_##name) parameters = rdma_##name;
        RDMA_CM_EXPORTED(X)
    """
    command = [*compiler(), "-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", "-x", "c", "-"]
    subprocess.run(command, input=program, text=True, check=True)
    changed = program.replace("(struct rdma_cm_id *, int backlog)", "(struct rdma_cm_id *, char *backlog)")
    assert subprocess.run(command, input=changed, text=True, capture_output=True).returncode
