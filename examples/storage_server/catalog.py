"""The catalog: which volumes there are, who may do what with them, and what was begun and not finished. SQLite, in WAL.

A commit is durable before it returns (synchronous=FULL), and a volume's file is made and taken away between two of
them: its row says 'making' before the file is there and 'ready' when it is whole, 'deleting' before it goes, and is
forgotten when it is gone. So whatever is found after a crash, the catalog tells how to go on: see `unfinished`.

Any thread may call it: a lock has one statement or transaction after the other. The command `access` uses the same
database from a process of its own.
"""

import hashlib
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from storage_server.errors import ExistsError, InvalidError, UnknownVolumeError
from storage_server.protocol import Mode

__all__ = ["BLOCK", "Catalog", "ClientRow", "VolumeRow", "key_of", "name_of", "new_token"]

BLOCK = 4096  # bytes: volumes have whole ones
_LARGEST = 1 << 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCHEMA = 1
_TABLES = """
CREATE TABLE volumes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the file's name: none is used twice
    name TEXT NOT NULL,
    size INTEGER NOT NULL,
    read_only INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('making', 'ready', 'deleting'))
) STRICT;
CREATE UNIQUE INDEX names ON volumes (name) WHERE state != 'deleting';
CREATE TABLE clients (
    name TEXT PRIMARY KEY,
    key BLOB NOT NULL,
    admin INTEGER NOT NULL
) STRICT;
CREATE TABLE rights (
    client TEXT NOT NULL REFERENCES clients (name) ON DELETE CASCADE,
    volume INTEGER NOT NULL REFERENCES volumes (id) ON DELETE CASCADE,
    mode INTEGER NOT NULL,
    PRIMARY KEY (client, volume)
) STRICT;
"""


class VolumeRow(NamedTuple):
    """A volume, as the catalog has it."""

    id: int
    name: str
    size: int
    read_only: bool


class ClientRow(NamedTuple):
    """A client, and what it may do with which volumes."""

    name: str
    admin: bool
    rights: dict[str, Mode]


def name_of(token: str) -> str:
    """Whose token it is.

    :raises InvalidError: it is none.
    """
    name, dot, secret = token.strip().rpartition(".")
    if not dot or not secret or not _NAME.fullmatch(name):
        raise InvalidError("a token has the form NAME.SECRET, as `access add` prints it")
    return name


def new_token(name: str) -> str:
    """A token that nobody can guess."""
    return f"{name}.{secrets.token_urlsafe(32)}"


def key_of(token: str) -> bytes:
    """What the server keeps of a token, and both ends prove that they know."""
    return hashlib.sha256(token.strip().encode()).digest()


class Catalog:
    """The database of a server's folder. What it does is done, and durable, when it returns.

    :param path: of its file, which is made where there is none.
    :raises InvalidError: the database is another version's.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
        self._lock = threading.RLock()
        try:
            path.chmod(0o600)  # it has the clients' keys
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("PRAGMA foreign_keys = ON")
            with self._transaction():
                (version,) = self._database.execute("PRAGMA user_version").fetchone()
                if not version:
                    for statement in _TABLES.split(";"):
                        self._database.execute(statement)
                    self._database.execute(f"PRAGMA user_version = {_SCHEMA}")
                elif version != _SCHEMA:
                    raise InvalidError(f"the catalog {path} has version {version}, and this server knows {_SCHEMA}")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE: two processes that read and then write would else find out too late that they are two.
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _query(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    # ---- Volumes

    def find(self, name: str) -> VolumeRow:
        """The volume of that name.

        :raises UnknownVolumeError: there is none.
        """
        rows = self._rows("state = 'ready' AND name = ?", name)
        if not rows:
            raise UnknownVolumeError(f"there is no volume {name!r}")
        return rows[0]

    def volumes(self) -> list[VolumeRow]:
        """All that are ready, by name."""
        return self._rows("state = 'ready' ORDER BY name")

    def unfinished(self) -> list[VolumeRow]:
        """Those whose making or deleting was begun: their files are to go, where they are there, and they with them."""
        return self._rows("state != 'ready'")

    def _rows(self, where: str, *values: object) -> list[VolumeRow]:
        found = self._query(f"SELECT id, name, size, read_only FROM volumes WHERE {where}", *values)
        return [VolumeRow(number, name, size, bool(read_only)) for number, name, size, read_only in found]

    def begin(self, name: str, size: int, *, read_only: bool = False) -> VolumeRow:
        """A volume is going to be made; its name is taken from now on.

        :raises ExistsError: it is taken already.
        :raises InvalidError: no volume can have that name or size.
        """
        if not _NAME.fullmatch(name):
            raise InvalidError(
                f"{name!r} is no name of a volume: 1 to 64 of letters, digits, '.', '_' and '-', the first no mark"
            )
        check_size(size)
        try:
            with self._transaction():
                done = self._database.execute(
                    "INSERT INTO volumes (name, size, read_only, state) VALUES (?, ?, ?, 'making')",
                    (name, size, read_only),
                )
        except sqlite3.IntegrityError as error:
            raise ExistsError(f"there is a volume {name!r} already") from error
        assert done.lastrowid is not None
        return VolumeRow(done.lastrowid, name, size, read_only)

    def finish(self, volume: int) -> None:
        """Its file is there, whole and durable."""
        self._set(volume, "state = 'ready'")

    def begin_delete(self, volume: int) -> None:
        """It is to be deleted: there is none of that name from now on."""
        self._set(volume, "state = 'deleting'")

    def forget(self, volume: int) -> None:
        """Its file is gone, for good."""
        with self._transaction():
            self._database.execute("DELETE FROM volumes WHERE id = ?", (volume,))

    def set_size(self, volume: int, size: int) -> None:
        """It has another size."""
        check_size(size)
        self._set(volume, "size = ?", size)

    def _set(self, volume: int, what: str, *values: object) -> None:
        with self._transaction():
            self._database.execute(f"UPDATE volumes SET {what} WHERE id = ?", (*values, volume))

    # ---- Clients

    def add_client(self, name: str, *, admin: bool = False, token: str | None = None) -> str:
        """A new client, which may do everything, or nothing so far; its token, which is not kept here.

        :param token: one of `new_token`; None: it is made here.
        :raises ExistsError: there is one of that name.
        :raises InvalidError: that is no name.
        """
        if not _NAME.fullmatch(name):
            raise InvalidError(f"{name!r} is no name of a client: 1 to 64 of letters, digits, '.', '_' and '-'")
        token = token or new_token(name)
        try:
            with self._transaction():
                self._database.execute("INSERT INTO clients VALUES (?, ?, ?)", (name, key_of(token), admin))
        except sqlite3.IntegrityError as error:
            raise ExistsError(f"there is a client {name!r} already") from error
        return token

    def remove_client(self, name: str) -> None:
        """It may do nothing any more.

        :raises UnknownVolumeError: there is none of that name.
        """
        with self._transaction():
            self._one_client(self._database.execute("DELETE FROM clients WHERE name = ?", (name,)), name)

    def _one_client(self, cursor: sqlite3.Cursor, name: str) -> None:
        if not cursor.rowcount:
            raise UnknownVolumeError(f"there is no client {name!r}")

    def allow(self, client: str, volume: str, mode: Mode) -> None:
        """What a client may do with a volume from now on; `Mode.NONE`: nothing.

        :raises UnknownVolumeError: there is no such volume, or no such client.
        """
        number = self.find(volume).id
        with self._transaction():
            self._one_client(self._database.execute("UPDATE clients SET name = name WHERE name = ?", (client,)), client)
            self._database.execute("DELETE FROM rights WHERE client = ? AND volume = ?", (client, number))
            if mode is not Mode.NONE:
                self._database.execute("INSERT INTO rights VALUES (?, ?, ?)", (client, number, int(mode)))

    def clients(self) -> list[ClientRow]:
        """All of them, by name."""
        found = self._query("SELECT name, admin FROM clients ORDER BY name")
        return [ClientRow(name, bool(admin), self._rights_of(name)) for name, admin in found]

    def _rights_of(self, client: str) -> dict[str, Mode]:
        query = (
            "SELECT volumes.name, mode FROM rights JOIN volumes ON id = volume "
            "WHERE client = ? AND state = 'ready' ORDER BY volumes.name"
        )
        return {name: Mode(mode) for name, mode in self._query(query, client)}

    def key(self, client: str) -> bytes | None:
        """What it proves to know; None: there is no such client."""
        found = self._query("SELECT key FROM clients WHERE name = ?", client)
        return found[0][0] if found else None

    def is_admin(self, client: str) -> bool:
        """Whether it may do everything."""
        return self._query("SELECT admin FROM clients WHERE name = ?", client) == [(1,)]

    def mode(self, client: str, volume: int) -> Mode:
        """What it may do with a volume."""
        if self.is_admin(client):
            return Mode.ADMIN
        query = "SELECT mode FROM rights WHERE client = ? AND volume = ?"
        found = self._query(query, client, volume)
        return Mode(found[0][0]) if found else Mode.NONE

    def version(self) -> int:
        """A number that is another one when another process changed something."""
        return int(self._query("PRAGMA data_version")[0][0])


def check_size(size: int) -> None:
    """See that a volume can have so many bytes.

    :raises InvalidError: it cannot.
    """
    if size < BLOCK or size > _LARGEST or size % BLOCK:
        raise InvalidError(f"a volume has whole blocks of {BLOCK:,} bytes, one at least, not {size:,} bytes")
