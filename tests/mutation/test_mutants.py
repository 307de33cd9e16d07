"""Faults found in a source, and the choice of mutants."""

import textwrap
from collections import Counter

import pytest

pytest.importorskip("tree_sitter_c", reason="nox -s mutate installs it")

from tests.mutation.c_mutants import c_faults, functions_of_lines as c_functions
from tests.mutation.mutants import Mutant, choose, mutants_of, only
from tests.mutation.python_mutants import functions_of_lines, python_faults

C = b"""
#include <errno.h>
static int count(struct thing *thing, int most)
{
    soft_lock_take(&thing->lock);
    assert(thing->open == true);
    if (thing->used >= most && !thing->closing) {
        soft_lock_give(&thing->lock);
        return EBUSY;
    }
    thing->used++;
    soft_wake(thing);
    soft_lock_give(&thing->lock);
    unpin(thing);
    return thing->places[0] ? 0 : EINVAL;
}
"""

PYTHON = textwrap.dedent("""
    class Thing:
        limit: int | None = None

        async def count(self, most: int = 1) -> bool | None:
            if self.used >= most and not self.closing:
                raise BusyError(errno.EBUSY)
            try:
                with self._lock:
                    self.used = most
                    self._changed.notify()
            except ValueError as error:
                await self.aclose()
            return each in self.places[0]
""").encode()

CYTHON = textwrap.dedent("""
    from libc.errno cimport EBUSY

    cdef class Thing:
        cdef int used

        cdef inline int count(self, void *most) except -1:
            cdef int *limit = <int *>most
            if self.used < (<int *>most)[0]:
                return EBUSY
            thing_end(&self.used)
            return 0
""").encode()


def changes(source: bytes, mutants: list[Mutant]) -> set[tuple[str, str]]:
    """Return the kind of each fault and the changed lines, stripped."""
    found = set()
    for mutant in mutants:
        lines = [line[1:].strip() for line in mutant.diff(source).splitlines() if line.startswith("+")]
        found.add((mutant.fault.operator, " / ".join(lines)))
    return found


def test_faults_in_c() -> None:
    mutants = list(mutants_of("a.c", C, c_faults(C)))
    found = changes(C, mutants)
    assert found == {
        ("lock removed", "; / ; / ;"),
        ("and for or", "if (thing->used >= most || !thing->closing) {"),
        ("comparison flipped", "if (thing->used < most && !thing->closing) {"),
        ("bound flipped", "if (thing->used > most && !thing->closing) {"),
        ("condition negated", "if (!(thing->used >= most && !thing->closing)) {"),
        ("state not checked", "if ((thing->used >= most && !thing->closing) && 0) {"),
        ("wrong errno", "return EINVAL;"),
        ("state not set", ";"),
        ("missing wake-up", ";"),
        ("missing free", ";"),
        ("freed too early", "unpin(thing);"),
        ("off by one", "return thing->places[1] ? 0 : EINVAL;"),
        ("wrong errno", "return thing->places[0] ? 0 : ENOMEM;"),
    }
    assert {mutant.key.partition(":")[0] for mutant in mutants} == {"count"}
    assert c_functions(C)[5] == "count"
    assert 2 not in c_functions(C)


@pytest.mark.parametrize(
    ("statements", "swapped"),
    [
        ("use(thing); unpin(thing);", True),
        ("thing->next->used--; thing_put(thing->next);", True),
        ("at.bytes = open_at(&pin); copy(&at); pin_close(&pin);", True),
        ("error = errno; descriptors_release();", False),
        ("assert_held(&thing->lock); close_all(thing);", False),
        ("close(thing->one); close(thing->other);", False),
        ("table_destroy(&thing->keys); mutex_destroy(&thing->lock);", False),
        ("other->thing--; unpin(thing);", False),
        ("something++; unpin(thing);", False),
        ("count_down(&context->things); free_thing(thing);", False),
        ("thing->at = place; count_down(&context->things); free_thing(thing);", False),
    ],
)
def test_freed_too_early_swaps_a_free_with_a_preceding_use(statements: str, swapped: bool) -> None:
    source = f"static void end(struct thing *thing)\n{{\n{statements}\n}}\n".encode()
    assert ("freed too early" in {fault.operator for fault in c_faults(source)}) == swapped


def test_faults_in_python() -> None:
    mutants = list(mutants_of("a.py", PYTHON, python_faults(PYTHON)))
    assert changes(PYTHON, mutants) == {
        ("condition negated", "if not (self.used >= most and not self.closing):"),
        ("state not checked", "if (self.used >= most and not self.closing) and False:"),
        ("comparison flipped", "if self.used < most and not self.closing:"),
        ("bound flipped", "if self.used > most and not self.closing:"),
        ("and for or", "if self.used >= most or not self.closing:"),
        ("wrong errno", "raise BusyError(errno.EINVAL)"),
        ("lock removed", "if True:"),
        ("state not set", "pass"),
        ("missing wake-up", "pass"),
        ("handler removed", "except tuple() as error:"),
        ("missing free", "pass"),
        ("comparison flipped", "return each not in self.places[0]"),
        ("off by one", "return each in self.places[1]"),
    }
    for mutant in mutants:
        compile(mutant.apply(PYTHON), "a.py", "exec")
    assert functions_of_lines(PYTHON)[6] == "Thing.count"


def test_faults_in_cython() -> None:
    mutants = list(mutants_of("a.pyx", CYTHON, python_faults(CYTHON)))
    assert changes(CYTHON, mutants) == {
        ("condition negated", "if not (self.used < (<int *>most)[0]):"),
        ("state not checked", "if (self.used < (<int *>most)[0]) and False:"),
        ("comparison flipped", "if self.used >= (<int *>most)[0]:"),
        ("bound flipped", "if self.used <= (<int *>most)[0]:"),
        ("off by one", "if self.used < (<int *>most)[1]:"),
        ("wrong errno", "return EINVAL"),
        ("missing free", "pass"),
        ("off by one", "return 1"),
    }
    assert {mutant.key.partition(":")[0] for mutant in mutants} == {"count"}


def test_edits_elsewhere_keep_the_ids() -> None:
    before = [mutant.id for mutant in mutants_of("a.c", C, c_faults(C))]
    edited = b"/* A comment. */\n" + C.replace(b"thing->used++;", b"thing->used += 2;")
    after = [mutant.id for mutant in mutants_of("a.c", edited, c_faults(edited))]
    assert len(before) == len(set(before))
    assert len(set(before) - set(after)) == 1, "the edited line has another ID"


def test_the_choice_depends_on_the_seed_and_is_spread() -> None:
    mutants = [
        mutant
        for name, times in (("a.c", 1), ("b.c", 9))
        for mutant in mutants_of(name, C * times, c_faults(C * times))
    ]
    chosen = choose(mutants, 40, seed=1)
    assert chosen == choose(mutants, 40, seed=1) != choose(mutants, 40, seed=2)
    assert Counter(mutant.path for mutant in chosen) == {"a.c": 4, "b.c": 36}
    assert len({mutant.fault.operator for mutant in chosen}) == 12, "each kind is among them"
    assert {mutant.id for mutant in choose(mutants, 20, seed=1)} <= {mutant.id for mutant in chosen}
    assert choose(mutants, 10_000, seed=1) == mutants


def test_paths_are_files_or_folders() -> None:
    paths = ["aioverbs/_pool/pool.py", "aioverbs/_pool/worker.py", "aioverbs/_pools.py"]
    assert only(paths, []) == paths
    assert only(paths, ["aioverbs/_pool/"]) == paths[:2]
    assert only(paths, ["aioverbs/_pool/worker.py"]) == paths[1:2]
