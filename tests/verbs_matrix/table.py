"""The table of each verb's results on the software device and on kernel soft-RoCE, stored in verbs.md.

    probe soft0 > soft0.txt
    python tests/rdma/vm.py -- probe rxe0 > rxe.txt      # a Linux guest with soft-RoCE
    python -m tests.verbs_matrix.table soft0.txt rxe.txt

The last command writes verbs.md from the probe's results and reasons.toml. With one file, the other column keeps its
contents; a file is named after its column.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = HERE.parent.parent / "aioverbs" / "_core"
TABLE = HERE / "verbs.md"
REASONS = HERE / "reasons.toml"
COLUMNS = ("soft0", "rxe")

Key = tuple[str, str]
Answers = dict[Key, str]

COLUMN_HEADS = "| verb | case | soft0 | rxe | reason |\n|---|---|---|---|---|"
HEAD = """\
# Results of each verb: the software device and soft-RoCE

`soft0` is the software device, with both values of `execution`; `rxe` is Linux 6.1's soft-RoCE through libibverbs 44.
Tests check both columns: each row runs in a process of its own, with a context of its own. A result consists of what
the verb returned (`0` or `ok`, or the errno) and of what followed: statuses and opcodes of completions, events, states
of the two queue pairs. `none`: nothing completed. `absent`: the seam between aioverbs and a provider lacks the verb.
If the results differ, the last column has the reason.
"""


@dataclass(frozen=True)
class Reason:
    """Reason why some rows differ, and shell-style patterns of these rows."""

    verb: str
    asked: tuple[str, ...]
    rxe: str
    text: str

    def fits(self, key: Key, rxe: str) -> bool:
        """Return whether the reason applies to a row."""
        asked = any(fnmatchcase(key[1], pattern) for pattern in self.asked)
        return asked and fnmatchcase(key[0], self.verb) and fnmatchcase(rxe, self.rxe)


def verbs() -> dict[str, list[str]]:
    """Return the verbs that need rows, by section: all verbs that the headers of the seam declare."""
    headers = ("abi/verbs_ops.h", "abi/libibverbs.h", "soft/objects/pd_share.h")
    seam, abi, shared = ((CORE / name).read_text() for name in headers)
    listed = seam.partition("define VERBS_EXPORTED(X)")[2].partition("struct verbs_table {")[0].replace("\\\n", " ")
    exported = re.findall(r"\bX\([^(]*?[ *](\w+),\s*\(", listed)
    return {
        "Exported verbs": exported,
        "Inline verbs of `struct ibv_context`": _ops(abi, "ibv_context_ops"),
        "Inline verbs of `struct verbs_context`": _ops(abi, "verbs_context"),
        "Extended completion queues": ["start_poll"],  # next_poll and end_poll belong to the same session
        "Shared protection domains": re.findall(r"\bsoft_(alloc_shpd|share_pd)\(", shared),
        "Beyond the seam": ["rereg_mr", "reg_dmabuf_mr"],
    }


def _ops(header: str, struct: str) -> list[str]:
    body = header.partition(f"struct {struct} {{")[2].partition("\n};")[0]
    return [name for name in re.findall(r"\(\*(\w+)\)", body) if not name.startswith(("_compat", "ABI_placeholder"))]


def parse_answers(lines: Iterable[str]) -> Answers:
    """Parse the probe's output.

    :raises ValueError: a row occurs twice.
    """
    answers: Answers = {}
    for line in lines:
        verb, asked, answer = line.rstrip("\n").split("\t")
        if (verb, asked) in answers:
            raise ValueError(f"duplicate row of {verb}: {asked}")
        answers[verb, asked] = answer
    return answers


def parse_reasons(text: str) -> list[Reason]:
    """Parse reasons.toml. `verb`, `asked` (several) and `rxe` are patterns, which match everything by default."""
    return [
        Reason(entry.get("verb", "*"), tuple(entry.get("asked", ["*"])), entry.get("rxe", "*"), entry["text"])
        for entry in tomllib.loads(text)["reason"]
    ]


def parse_table(text: str) -> tuple[dict[str, Answers], dict[Key, str]]:
    """Return the columns of the table by name, and its reasons."""
    columns: dict[str, Answers] = {name: {} for name in COLUMNS}
    reasons: dict[Key, str] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            verb, asked, soft0, rxe, reason = (cell.strip() for cell in line.strip("|").split("|"))
            key = verb.strip("`"), asked
            columns["soft0"][key], columns["rxe"][key], reasons[key] = soft0, rxe, reason
    return columns, reasons


def first_fitting(reasons: Iterable[Reason], key: Key, rxe: str) -> Reason | None:
    """Return the reason that applies to a row, or None."""
    return next((reason for reason in reasons if reason.fits(key, rxe)), None)


def render(columns: dict[str, Answers], reasons: list[Reason]) -> str:
    """Return the table's text."""
    parts = [HEAD]
    for heading, names in verbs().items():
        parts.append(f"\n## {heading}\n\n| verb | case | soft0 | rxe | reason |\n|---|---|---|---|---|\n")
        for name in names:
            for key, soft0 in columns["soft0"].items():
                if key[0] == name:
                    rxe = columns["rxe"].get(key, "not asked")
                    reason = first_fitting(reasons, key, rxe) if soft0 != rxe else None
                    cells = (f"`{name}`", key[1], soft0, rxe, reason.text if reason else "")
                    parts.append(f"| {' | '.join(cells)} |\n".replace("|  |", "| |"))
    return "".join(parts)


def main(files: list[str]) -> None:
    """Write the table."""
    columns = parse_table(TABLE.read_text())[0] if TABLE.exists() else {name: {} for name in COLUMNS}
    for path in map(Path, files):
        columns[path.stem] = parse_answers(path.read_text().splitlines())
    text = render(columns, parse_reasons(REASONS.read_text()))
    TABLE.write_text(text)
    done, reasons = parse_table(text)
    for key, reason in reasons.items():
        if done["soft0"][key] != done["rxe"][key] and not reason:
            print(f"no reason: {key[0]}: {key[1]}: {done['soft0'][key]} / {done['rxe'][key]}")


if __name__ == "__main__":
    main(sys.argv[1:])
