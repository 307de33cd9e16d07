"""Code blocks of a Markdown page, run in the order of the page.

- ``python``: a program. With a first line such as ``# store.py`` it is saved under that name, else it is run.
- ``toml``: with such a first line, a file.
- ``sh``: lines for a shell. A command that ends with ``&`` runs until the end of the page; ``$!`` is its process.
- ``text`` after one of them: its output. ``...`` stands for any text.
- ``py``: a part of a program on the page, or of an example.

Other blocks (``console`` and so on) are not run. Programs run in an empty folder, with the software device.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["RUN", "Block", "blocks", "run"]

RUN = ("python", "sh", "toml")
PORT = "7480"  # port in the pages; replaced by a free one
_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"# (\w+\.(?:py|toml))\n")
_LIMIT_S = 50


@dataclass(frozen=True)
class Block:
    """A fenced block.

    :param kind: the language after the opening backquotes.
    :param output: text of the ``text`` block directly below; None if there is none.
    """

    kind: str
    text: str
    output: str | None


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page; a block with the output of another one becomes that one's `output`."""
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(page):
        beneath = not page[end : match.start()].strip()
        if match[2] == "text" and found and beneath and found[-1].kind in RUN and found[-1].output is None:
            found[-1] = Block(found[-1].kind, found[-1].text, match[3])
        else:
            found.append(Block(match[2], match[3], None))
        end = match.end()
    return found


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@dataclass
class _Reader:
    """Runs the blocks of a page.

    :param folder: folder in which programs are saved and run.
    """

    folder: Path
    port: str = field(default_factory=_free_port)
    left: list["subprocess.Popen[str]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.env = {**os.environ, "PATH": path, "AIOVERBS_DEVICE": "soft0", "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
        self.env |= {"PYTHONDONTWRITEBYTECODE": "1", "AIOVERBS_MONITOR_DIRECTORY": str(self.folder / "monitor")}
        self.env.pop("PYTEST_ADDOPTS", None)

    def follow(self, block: Block) -> None:
        text = block.text.replace(PORT, self.port)
        output = (block.output or "").replace(PORT, self.port)
        if block.kind in ("python", "toml"):
            if name := _NAME.match(text):
                (self.folder / name[1]).write_text(text)
            else:
                self._run([sys.executable, "-P", "-W", "error", "-c", text], output)
        elif text.rstrip().endswith("&"):
            self._start(text.rstrip().removesuffix("&"), output)
        else:
            last = str(self.left[-1].pid) if self.left else ""
            self._run(["bash", "-ec", text.replace("$!", last)], output)

    def _run(self, command: list[str], output: str) -> None:
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), f"{command[-1]}\n{done.stdout}\n{done.stderr}"
        assert _fits(output, done.stdout), f"{command[-1]}\nprinted\n{done.stdout}\nand not\n{output}"

    def _start(self, command: str, output: str) -> None:
        started = subprocess.Popen(
            ["env", *shlex.split(command)],
            env=self.env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.left.append(started)
        assert started.stdout is not None
        printed = "".join(started.stdout.readline() for _ in output.splitlines())
        assert _fits(output, printed), f"{command}\nprinted\n{printed}\nand not\n{output}"


def _fits(expected: str, printed: str) -> bool:
    pattern = re.escape(_trimmed(expected)).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, _trimmed(printed), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@contextlib.contextmanager
def _reader(folder: Path) -> Iterator[_Reader]:
    reader = _Reader(folder)
    try:
        yield reader
    finally:
        for process in reader.left:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_LIMIT_S)


def run(page: str, folder: Path) -> None:
    """Run the blocks of a page.

    :raises AssertionError: a command failed, or its output differs.
    """
    with _reader(folder) as reader:
        for block in blocks(page):
            if block.kind in RUN:
                reader.follow(block)
