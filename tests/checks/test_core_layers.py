from pathlib import Path

import pytest

from tests.checks.core_layers import LAYERS, problems

pytestmark = pytest.mark.toolchain


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """Return a core with a lower folder and an upper folder that uses it."""
    for layer in LAYERS:
        (tmp_path / layer).mkdir(parents=True)
    (tmp_path / "soft/objects/lower.h").write_text("int soft_lower(void);\n")
    (tmp_path / "soft/objects/lower.c").write_text(
        '#include "soft/objects/lower.h"\nint soft_lower(void) { return 1; }'
    )
    (tmp_path / "soft/api/upper.h").write_text("int soft_upper(void);\n")
    source = (
        '#include "soft/api/upper.h"\n#include "soft/objects/lower.h"\nint soft_upper(void) { return soft_lower(); }'
    )
    (tmp_path / "soft/api/upper.c").write_text(source)
    return tmp_path


def test_downwards_is_allowed(core: Path) -> None:
    assert problems(core) == []


@pytest.mark.parametrize(
    ("file", "include"), [("other.c", '#include "soft/api/upper.h"'), ("other.h", '  #  include "../api/upper.h"')]
)
def test_an_include_upwards_is_found(core: Path, include: str, file: str) -> None:
    (core / "soft/objects" / file).write_text(f"\n{include}\n")
    assert [each.split(",")[0] for each in problems(core)] == [
        f"soft/objects/{file}:2: includes {include.split(chr(34))[1]}"
    ]


CALLS = {
    "declared": "int soft_upper(void);\nint soft_other(void) { return soft_upper(); }",
    "unused": "int soft_upper(void);\nstatic int other_unused(void) { return soft_upper(); }",
    "address": "int soft_upper(void);\nint (*const soft_pointer)(void) = soft_upper;",
    "inside": "int soft_inside(void)\n{\n    extern int soft_upper(void);\n    return soft_upper();\n}",
    "macro": "int soft_upper(void);\n#define UPPER(x) soft_##x()\nint soft_by_macro(void) { return UPPER(upper); }",
}


def test_a_call_upwards_is_found_without_an_include(core: Path) -> None:
    for name, source in CALLS.items():
        (core / f"soft/objects/{name}.c").write_text(source)
    assert sorted(problems(core)) == [
        f"soft/objects/{name}.c: uses soft_upper of soft/api/upper.c, above soft/objects" for name in sorted(CALLS)
    ]


def test_a_call_upwards_is_found_in_an_inline_function_that_nothing_uses(core: Path) -> None:
    source = "int soft_upper(void);\nstatic inline int soft_other(void) { return soft_upper(); }"
    (core / "soft/objects/other.h").write_text(source)
    assert problems(core) == ["soft/objects/other.h: uses soft_upper of soft/api/upper.c, above soft/objects"]


def test_a_folder_without_a_place_is_found(core: Path) -> None:
    (core / "soft/elsewhere").mkdir()
    (core / "soft/elsewhere/other.c").touch()
    assert problems(core) == ["soft/elsewhere/other.c: soft/elsewhere has no place in LAYERS"]


def test_static_functions_of_one_name_are_found(core: Path) -> None:
    for folder in ("soft/base", "soft/fabric"):
        (core / folder / "other.c").write_text("static void other_do(void) {}")
    assert problems(core) == ["other_do: several functions have this name: soft/base/other.c, soft/fabric/other.c"]


def test_an_inline_function_of_a_header_is_one_function(core: Path) -> None:
    (core / "soft/base/other.h").write_text("static inline void soft_other(void) {}")
    for folder in ("soft/base", "soft/fabric"):
        (core / folder / "user.c").write_text('#include "soft/base/other.h"')
    assert problems(core) == []


def test_a_function_with_a_name_of_the_c_library_is_found(core: Path) -> None:
    (core / "soft/base/other.c").write_text("static void raise(void) {}")
    assert problems(core) == ["raise: shadows the C library's: soft/base/other.c"]
