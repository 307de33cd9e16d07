"""Enumerations have all names and values of the ABI."""

import os
import shlex
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from aioverbs import types
from tests.abi.declarations import read
from tests.conftest import ROOT

CORE = ROOT / "aioverbs" / "_core"

# For each enumeration, its name in libibverbs.h (None if unnamed) and the prefix of its members.
IN_C: dict[type[IntEnum] | type[IntFlag], tuple[str | None, str]] = {
    types.AccessFlags: ("ibv_access_flags", "IBV_ACCESS_"),
    types.AtomicCap: ("ibv_atomic_cap", "IBV_ATOMIC_"),
    types.EventType: ("ibv_event_type", "IBV_EVENT_"),
    types.GidType: ("ibv_gid_type", "IBV_GID_TYPE_"),
    types.LinkLayer: (None, "IBV_LINK_LAYER_"),
    types.Mtu: ("ibv_mtu", "IBV_"),
    types.MwType: ("ibv_mw_type", "IBV_MW_"),
    types.NodeType: ("ibv_node_type", "IBV_NODE_"),
    types.PortState: ("ibv_port_state", "IBV_PORT_"),
    types.QpAttrMask: ("ibv_qp_attr_mask", "IBV_QP_"),
    types.QpState: ("ibv_qp_state", "IBV_QPS_"),
    types.QpType: ("ibv_qp_type", "IBV_QPT_"),
    types.SendFlags: ("ibv_send_flags", "IBV_SEND_"),
    types.SendOpcode: ("ibv_wr_opcode", "IBV_WR_"),
    types.TransportType: ("ibv_transport_type", "IBV_TRANSPORT_"),
    types.WcFlags: ("ibv_wc_flags", "IBV_WC_"),
    types.WcOpcode: ("ibv_wc_opcode", "IBV_WC_"),
    types.WcStatus: ("ibv_wc_status", "IBV_WC_"),
}


# Mtu.NONE is not compared: the headers have no name for the 0 that providers report.


def test_every_enumeration_is_compared() -> None:
    assert {enumeration.__name__ for enumeration in IN_C} == set(types.__all__)


def compile_failures(lines: list[str], tmp_path: Path) -> str:
    source = tmp_path / "values.c"
    source.write_text("\n".join(['#include "abi/libibverbs.h"', *lines, ""]))
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c11", f"-I{CORE}", "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.toolchain
def test_values(tmp_path: Path) -> None:
    asserts = [
        f'_Static_assert({prefix}{member.name} == {member.value}, "{enumeration.__name__}.{member.name}");'
        for enumeration, (_, prefix) in IN_C.items()
        for member in enumeration
        if member is not types.Mtu.NONE
    ]
    assert compile_failures(asserts, tmp_path) == ""


@pytest.mark.toolchain
def test_a_wrong_value_is_found(tmp_path: Path) -> None:
    assert "QpType.RC" in compile_failures(['_Static_assert(IBV_QPT_RC == 3, "QpType.RC");'], tmp_path)


@pytest.mark.toolchain
def test_names() -> None:
    declared = read((CORE / "abi/libibverbs.h").read_text(), tuple(shlex.split(os.environ.get("CC", "cc"))))
    for enumeration, (tag, prefix) in IN_C.items():
        names = {
            name.removeprefix(prefix)
            for each in declared.enumerations
            if each.tag == tag
            for name, _ in each.values
            if name.startswith(prefix)
        }
        ours = {member.name for member in enumeration if member is not types.Mtu.NONE}
        assert names == ours, enumeration.__name__


def test_mtu_in_bytes() -> None:
    assert [mtu.size for mtu in types.Mtu] == [0, 256, 512, 1024, 2048, 4096]
