"""libibverbs.h agrees with <infiniband/verbs.h>, and the comparison notices edits."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from . import comparison, mutants
from .comparison import OURS, Check, compare, compiler, prefixed
from .declarations import Aggregate, Declarations, Enumeration, read

HEADER = Path(__file__).parents[2] / "aioverbs" / "_core" / "abi" / "libibverbs.h"
PACKAGE_LINE = "no <infiniband/verbs.h>: apt-get install libibverbs-dev"

# aioverbs requires these: if one is absent, the installed header is too old or the check is broken.
INDISPENSABLE = frozenset(
    {
        "struct ibv_context.ops",
        "struct ibv_context.abi_compat",
        "struct ibv_context_ops.poll_cq",
        "struct ibv_context_ops.post_recv",
        "struct ibv_context_ops.post_send",
        "struct ibv_context_ops.req_notify_cq",
        "struct ibv_cq_ex.start_poll",
        "struct ibv_cq_init_attr_ex.parent_domain",
        "struct ibv_parent_domain_init_attr.alloc",
        "struct ibv_parent_domain_init_attr.td",
        "struct ibv_qp_ex.wr_start",
        "struct ibv_qp_init_attr_ex.send_ops_flags",
        "struct ibv_send_wr.wr.rdma.remote_addr",
        "struct verbs_context.alloc_parent_domain",
        "struct verbs_context.alloc_td",
        "struct verbs_context.close_xrcd",
        "struct verbs_context.create_cq_ex",
        "struct verbs_context.create_qp_ex",
        "struct verbs_context.create_srq_ex",
        "struct verbs_context.dealloc_td",
        "struct verbs_context.open_xrcd",
        "struct verbs_context.sz",
        "IBV_ALLOCATOR_USE_DEFAULT",
        "IBV_CREATE_CQ_ATTR_SINGLE_THREADED",
        "IBV_QPS_ERR",
        "IBV_WC_WR_FLUSH_ERR",
        "IBV_WR_RDMA_WRITE",
        "__VERBS_ABI_IS_EXTENDED",
    }
)


def require_reference(*flags: str) -> None:
    if comparison.reference_is_installed(flags):
        return
    if "CI" in os.environ:
        pytest.fail(PACKAGE_LINE)
    pytest.skip(PACKAGE_LINE)


@pytest.fixture(scope="module")
def header() -> str:
    return HEADER.read_text()


@pytest.fixture(scope="module")
def declarations(header: str) -> Declarations:
    require_reference()
    return read(header, compiler())


# -- The header ---------------------------------------------------------------------------------


def test_compiles_without_a_warning() -> None:
    strict = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only")
    subprocess.run([*compiler(), *strict, "-x", "c", HEADER], check=True)


def test_agrees_with_the_installed_header(declarations: Declarations) -> None:
    report = compare(declarations)
    print("checked:", report.checked, "absent:", *sorted(report.absent))
    assert not report.different
    assert not report.absent & INDISPENSABLE


def test_every_declaration_is_compared(header: str, declarations: Declarations) -> None:
    tags = re.findall(r"^(?:struct|union|enum) (\w+) \{", header, re.MULTILINE)
    constants = re.findall(r"^    (IBV_\w+)(?: =.*)?,", header, re.MULTILINE)
    constants += re.findall(r"^#define ((?:IBV|__VERBS)_\w+) ", header, re.MULTILINE)

    parsed: list[Aggregate | Enumeration] = [*declarations.aggregates, *declarations.enumerations]
    values = [name for each in declarations.enumerations for name, _ in each.values]
    assert sorted(tags) == sorted(each.tag for each in parsed if each.tag)
    assert sorted(constants) == sorted([*values, *(name for name, _ in declarations.macros)])
    growing = [each for each in declarations.aggregates if each.grows]
    assert len(growing) == header.count("/* grows")
    names = {check.name for check in comparison.all_checks(declarations, frozenset())}
    assert {*INDISPENSABLE, *constants} <= names
    assert {each.name for each in declarations.aggregates} <= names


def test_an_op_is_found_by_its_distance_from_the_end(tmp_path: Path) -> None:
    program = """
        #include "abi/libibverbs.h"

        static struct ibv_td *alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
        {
            (void)context, (void)attr;
            return NULL;
        }

        int main(void)
        {
            struct verbs_context made = {.alloc_td = alloc_td, .sz = sizeof(made)};
            if (verbs_context_of(&made.context))
                return 1;
            made.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
            struct verbs_context *found = verbs_context_of(&made.context);
            if (found != &made || !VERBS_HAS_OP(found, alloc_td) || VERBS_HAS_OP(found, open_qp))
                return 2;
            made.sz = VERBS_OP_DISTANCE(alloc_td);
            if (!VERBS_HAS_OP(found, alloc_td))
                return 3;
            made.sz -= sizeof(void *);
            return VERBS_HAS_OP(found, alloc_td) ? 4 : 0;
        }
    """
    binary = tmp_path / "program"
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parents[1]}")
    command = [*compiler(), *flags, "-o", str(binary), "-x", "c", "-"]
    subprocess.run(command, input=program, text=True, check=True)
    assert subprocess.run([binary]).returncode == 0


# -- The check itself ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def absent(declarations: Declarations) -> frozenset[str]:
    return comparison.find_absent(declarations)


def test_every_changed_field_is_noticed(declarations: Declarations, absent: frozenset[str]) -> None:
    changed = [
        mutant
        for aggregate in declarations.aggregates
        for mutant in mutants.aggregate_mutants(aggregate)
        if not mutant.reported & absent
    ]
    present = {each.tag for each in declarations.aggregates if each.name not in absent}
    assert {mutant.aggregate.tag for mutant in changed} == present

    preamble = [comparison.prefixed_declarations(declarations)]
    checks: list[Check] = []
    origins: list[int] = []
    for number, mutant in enumerate(changed):
        own_name = f"{mutant.aggregate.keyword} mutant_{number}"
        declared = prefixed(mutant.aggregate.declared())
        preamble.append(declared.replace(prefixed(mutant.aggregate.name), own_name, 1))
        made = list(comparison.aggregate_checks(mutant.aggregate, absent, own_name))
        checks += made
        origins += [number] * len(made)

    reported: list[set[str]] = [set() for _ in changed]
    for index in comparison.failing("\n".join(preamble), checks):
        reported[origins[index]].add(checks[index].name)
    for mutant, names in zip(changed, reported, strict=True):
        assert mutant.reported & names, mutant
        assert {name.split(".")[0] for name in names} == {mutant.aggregate.name}, mutant
        assert names == mutant.reported or not mutant.exactly, mutant


def test_every_changed_constant_is_noticed(declarations: Declarations, absent: frozenset[str]) -> None:
    preamble = [comparison.prefixed_declarations(declarations)]
    checks: list[Check] = []
    expected: list[str] = []
    for enumeration in declarations.enumerations:
        for changed, mutant in mutants.enumeration_mutants(enumeration, OURS):
            if changed in absent:
                continue
            prefix = f"mutant_{len(expected)}_"
            expected.append(changed)
            preamble.append(prefixed(mutant.declared(), prefix))
            checks += comparison.enumeration_checks(mutant, absent, prefix)
    for name, value in declarations.macros:
        if name not in absent:
            expected.append(name)
            checks.append(comparison.macro_check(name, f"((uintptr_t){value} + 1)"))

    failed = comparison.failing("\n".join(preamble), checks)
    assert [checks[index].name for index in failed] == expected


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        (
            "int (*dealloc_td)(struct ibv_td *td);",
            "int (*dealloc_td)(struct ibv_pd *td);",
            {"struct verbs_context.dealloc_td"},
        ),
        (
            "    uint8_t src_path_bits;\n    uint8_t static_rate;",
            "    uint8_t static_rate;\n    uint8_t src_path_bits;",
            {"struct ibv_ah_attr.src_path_bits", "struct ibv_ah_attr.static_rate"},
        ),
        ("    uint32_t rate_limit; /* kbps */\n};", "};", {"struct ibv_qp_attr"}),
        (
            "    IBV_WC_WR_FLUSH_ERR,\n    IBV_WC_MW_BIND_ERR,",
            "    IBV_WC_MW_BIND_ERR,\n    IBV_WC_WR_FLUSH_ERR,",
            {"IBV_WC_WR_FLUSH_ERR", "IBV_WC_MW_BIND_ERR"},
        ),
        ("((void *)-1)", "((void *)-2)", {"IBV_ALLOCATOR_USE_DEFAULT"}),
    ],
    ids=["signature of an op", "order", "missing last field", "order of values", "macro"],
)
@pytest.mark.usefixtures("declarations")
def test_an_edit_of_the_header_is_noticed(header: str, before: str, after: str, reported: set[str]) -> None:
    assert header.count(before) == 1
    edited = read(header.replace(before, after), compiler())
    assert compare(edited).names == reported


def test_a_missing_op_moves_the_ops_before_it(header: str, declarations: Declarations, absent: frozenset[str]) -> None:
    edited = header.replace("    int (*dealloc_td)(struct ibv_td *td);\n", "")
    (context,) = (each for each in declarations.aggregates if each.tag == "verbs_context")
    names = [f"{context.name}.{path}" for path, _ in context.paths()]
    in_front = set(names[: names.index("struct verbs_context.dealloc_td")])
    assert compare(read(edited, compiler())).names == in_front - absent


def test_additions_of_later_releases_are_absent_not_different(header: str, absent: frozenset[str]) -> None:
    for place, added in (
        ("struct verbs_context {\n", "    int (*later_op)(void);\n"),
        ("    uint32_t ndev_ifindex;\n", "    uint64_t later_field[8];\n"),
        ("    IBV_EVENT_WQ_FATAL,\n", "    IBV_EVENT_LATER,\n"),
        ("struct verbs_ex_private;\n", "struct ibv_later { int field; };\n"),
        ("#define IBV_QPF_GRH_REQUIRED (1 << 0)\n", "#define IBV_QPF_LATER (1 << 1)\n"),
    ):
        assert header.count(place) == 1
        header = header.replace(place, place + added)
    report = compare(read(header, compiler()))
    assert not report.different
    assert report.absent - absent == {
        "struct verbs_context.later_op",
        "struct ibv_gid_entry.later_field",
        "IBV_EVENT_LATER",
        "struct ibv_later",
        "struct ibv_later.field",
        "IBV_QPF_LATER",
    }


def test_no_installed_header_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install libibverbs-dev"):
        require_reference("-nostdinc")


def test_no_installed_header_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install libibverbs-dev"):
        require_reference("-nostdinc")
