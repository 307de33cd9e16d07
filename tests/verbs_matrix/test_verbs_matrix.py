"""Check the table in verbs.md: results of each verb on the software device and soft-RoCE, and why they differ."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from aioverbs import Mtu
from tests.rdma.seam import opened, rdma_devices
from tests.verbs_matrix import table
from tests.verbs_matrix.build import build

COLUMNS, TEXTS = table.parse_table(table.TABLE.read_text())
RULES = table.parse_reasons(table.REASONS.read_text())


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the probe; built here unless AIOVERBS_TEST_PROBE names it."""
    if path := os.environ.get("AIOVERBS_TEST_PROBE"):
        return Path(path)
    return build(tmp_path_factory.mktemp("probe"))


def answers(probe: Path, *devices: str) -> list[table.Answers]:
    """Results of all devices, run concurrently, since they mostly wait."""
    with contextlib.ExitStack() as stack:

        def ask(device: str) -> "subprocess.Popen[str]":
            pipe = subprocess.PIPE
            return stack.enter_context(subprocess.Popen([probe, device], stdout=pipe, stderr=pipe, text=True))

        asked = [ask(each) for each in devices]
        for process in asked:
            stack.callback(process.kill)
        said = [process.communicate(timeout=200) for process in asked]
    assert [process.returncode for process in asked] == [0] * len(devices), said
    return [table.parse_answers(output.splitlines()) for output, _ in said]


def compare(found: table.Answers, column: str) -> None:
    kept = COLUMNS[column]
    assert found.keys() == kept.keys(), "other rows: write the table anew"
    changed = [
        f"{verb}: {asked}: {found[verb, asked]}, not {kept[verb, asked]}"
        for verb, asked in kept
        if found[verb, asked] != kept[verb, asked]
    ]
    assert not changed, "\n".join(changed)


@pytest.mark.toolchain
@pytest.mark.timeout(300)
def test_software_device(probe: Path) -> None:
    for found in answers(probe, "soft0", "soft0:thread"):
        compare(found, "soft0")


@pytest.mark.rdma
@pytest.mark.timeout(300)
def test_soft_roce(probe: Path) -> None:
    device = rdma_devices()[0]
    if not device.startswith("rxe"):
        pytest.skip(f"the table describes soft-RoCE, not {device}")
    with opened(device) as context:
        if (mtu := context.query_port(1).active_mtu) != Mtu.MTU_4096:
            pytest.skip(f"the table describes a port with an MTU of 4096 bytes, not {Mtu(mtu).size}")
    (found,) = answers(probe, device)
    compare(found, "rxe")


def test_every_verb_has_a_row_and_every_row_a_verb() -> None:
    parts = table.verbs()
    assert [part for part, names in parts.items() if not names] == []
    assert {verb for verb, _ in COLUMNS["soft0"]} == {name for names in parts.values() for name in names}


def test_every_difference_has_its_reason() -> None:
    different = {key for key, answer in COLUMNS["soft0"].items() if answer != COLUMNS["rxe"][key]}
    assert {key for key, text in TEXTS.items() if text} == different


def test_every_reason_has_a_difference() -> None:
    used = set()
    for key, soft0 in COLUMNS["soft0"].items():
        rxe = COLUMNS["rxe"][key]
        used |= {table.first_fitting(RULES, key, rxe)} if soft0 != rxe else set()
    assert [rule for rule in RULES if rule not in used] == []


def test_the_table_is_up_to_date() -> None:
    assert table.TABLE.read_text() == table.render(COLUMNS, RULES)
