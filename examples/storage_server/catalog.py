"""The catalog: volumes, clients, rights and unfinished changes, in an SQLite database in WAL mode.

A commit is durable before it returns (synchronous=FULL). The state of a volume's row changes before and after its file
does:

    making --file is created--> ready --row changes--> deleting --file is deleted--> (no row)

So after a crash the row shows how to continue: see `unfinished`.

All methods may be called from any thread; a lock serializes statements and transactions. The command `access` uses the
same database from another process.
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

BLOCK = 4096  # bytes; sizes of volumes are multiples of this
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
    """A row of table `volumes`.

    :param id: number of the volume, never used twice; the file's name.
    :param name: the volume's name.
    :param size: bytes.
    :param read_only: whether it is a snapshot.
    """

    id: int
    name: str
    size: int
    read_only: bool


class ClientRow(NamedTuple):
    """A client and its rights, by volume name."""

    name: str
    admin: bool
    rights: dict[str, Mode]


def name_of(token: str) -> str:
    """Return the client's name that a token contains.

    :raises InvalidError: the text is not a token.
    """
    name, dot, secret = token.strip().rpartition(".")
    if not dot or not secret or not _NAME.fullmatch(name):
        raise InvalidError("a token has the form NAME.SECRET, as `access add` prints it")
    return name


def new_token(name: str) -> str:
    """Return a new random token for a client: ``NAME.SECRET``."""
    return f"{name}.{secrets.token_urlsafe(32)}"


def key_of(token: str) -> bytes:
    """Return the 32-byte key for a token, which the server stores and which both ends use for proofs."""
    return hashlib.sha256(token.strip().encode()).digest()


class Catalog:
    """Database of a server's folder. Every change is durable when its method returns. The caller must call `close`.

    All methods raise `sqlite3.Error` if the database fails, for example when another process locks it for 10 seconds.

    :param path: path of the database file, which is created if missing.
    :raises InvalidError: the database has another schema version.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
        self._lock = threading.RLock()
        try:
            path.chmod(0o600)  # the file contains the clients' keys
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
                    raise InvalidError(f"the catalog {path} has version {version}, but this server supports {_SCHEMA}")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Hold the lock and a transaction for the duration of the block; undo the changes if the block fails."""
        # IMMEDIATE: with a deferred transaction, two processes that read and then write would fail at the write.
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _query(self, statement: str, *values: object) -> list[Any]:
        """Run a statement; return all rows of its result."""
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    # ---- Volumes

    def find(self, name: str) -> VolumeRow:
        """Return the row of the volume with the given name.

        :raises UnknownVolumeError: there is no such volume.
        """
        rows = self._rows("state = 'ready' AND name = ?", name)
        if not rows:
            raise UnknownVolumeError(f"there is no volume {name!r}")
        return rows[0]

    def volumes(self) -> list[VolumeRow]:
        """Return the rows of all volumes that are ready, sorted by name."""
        return self._rows("state = 'ready' ORDER BY name")

    def unfinished(self) -> list[VolumeRow]:
        """Return the rows of the volumes whose creation or deletion was interrupted; their files and rows must be
        deleted.
        """
        return self._rows("state != 'ready'")

    def _rows(self, where: str, *values: object) -> list[VolumeRow]:
        """Return the rows of the volumes for which a condition in SQL is true."""
        found = self._query(f"SELECT id, name, size, read_only FROM volumes WHERE {where}", *values)
        return [VolumeRow(number, name, size, bool(read_only)) for number, name, size, read_only in found]

    def begin(self, name: str, size: int, *, read_only: bool = False) -> VolumeRow:
        """Add a volume in the state 'making'. Its name is taken from now on.

        :returns: the new row.
        :raises ExistsError: the name is taken.
        :raises InvalidError: the name or the size is invalid.
        """
        if not _NAME.fullmatch(name):
            raise InvalidError(
                f"{name!r} is not a valid volume name: use 1 to 64 letters, digits, '.', '_' and '-', "
                "and begin with a letter or digit"
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
        """Mark a volume, whose file must be complete and durable, as ready."""
        self._set(volume, "state = 'ready'")

    def begin_delete(self, volume: int) -> None:
        """Mark a volume for deletion. Its name is free from now on."""
        self._set(volume, "state = 'deleting'")

    def forget(self, volume: int) -> None:
        """Delete the row of a volume whose file has been deleted."""
        with self._transaction():
            self._database.execute("DELETE FROM volumes WHERE id = ?", (volume,))

    def set_size(self, volume: int, size: int) -> None:
        """Set the size of a volume.

        :param volume: number of the volume.
        :param size: new size in bytes.
        :raises InvalidError: the size is invalid.
        """
        check_size(size)
        self._set(volume, "size = ?", size)

    def _set(self, volume: int, what: str, *values: object) -> None:
        """Change columns of a volume's row.

        :param volume: number of the volume.
        :param what: the assignment in SQL.
        :param values: values for the placeholders in ``what``.
        """
        with self._transaction():
            self._database.execute(f"UPDATE volumes SET {what} WHERE id = ?", (*values, volume))

    # ---- Clients

    def add_client(self, name: str, *, admin: bool = False, token: str | None = None) -> str:
        """Add a client. The catalog stores only the key derived from the token.

        :param name: name of the client.
        :param admin: whether the client may do everything; otherwise it has no rights yet.
        :param token: a token from `new_token`; None to create one.
        :returns: the client's token.
        :raises ExistsError: there already is a client with that name.
        :raises InvalidError: the name is invalid.
        """
        if not _NAME.fullmatch(name):
            raise InvalidError(f"{name!r} is not a valid client name: use 1 to 64 letters, digits, '.', '_' and '-'")
        token = token or new_token(name)
        try:
            with self._transaction():
                self._database.execute("INSERT INTO clients VALUES (?, ?, ?)", (name, key_of(token), admin))
        except sqlite3.IntegrityError as error:
            raise ExistsError(f"there is a client {name!r} already") from error
        return token

    def remove_client(self, name: str) -> None:
        """Delete a client and all its rights.

        :raises UnknownVolumeError: there is no such client.
        """
        with self._transaction():
            self._one_client(self._database.execute("DELETE FROM clients WHERE name = ?", (name,)), name)

    def _one_client(self, cursor: sqlite3.Cursor, name: str) -> None:
        """Check that a statement changed the row of a client.

        :param cursor: result of the statement.
        :param name: name of the client, for the error.
        :raises UnknownVolumeError: no row was changed, which means that there is no such client.
        """
        if not cursor.rowcount:
            raise UnknownVolumeError(f"there is no client {name!r}")

    def allow(self, client: str, volume: str, mode: Mode) -> None:
        """Set a client's right to a volume; `Mode.NONE` removes it.

        :raises UnknownVolumeError: there is no such volume, or no such client.
        """
        number = self.find(volume).id
        with self._transaction():
            self._one_client(self._database.execute("UPDATE clients SET name = name WHERE name = ?", (client,)), client)
            self._database.execute("DELETE FROM rights WHERE client = ? AND volume = ?", (client, number))
            if mode is not Mode.NONE:
                self._database.execute("INSERT INTO rights VALUES (?, ?, ?)", (client, number, int(mode)))

    def clients(self) -> list[ClientRow]:
        """Return all clients, sorted by name, with their rights."""
        found = self._query("SELECT name, admin FROM clients ORDER BY name")
        return [ClientRow(name, bool(admin), self._rights_of(name)) for name, admin in found]

    def _rights_of(self, client: str) -> dict[str, Mode]:
        """Return a client's rights by volume name; volumes that are not ready are left out."""
        query = (
            "SELECT volumes.name, mode FROM rights JOIN volumes ON id = volume "
            "WHERE client = ? AND state = 'ready' ORDER BY volumes.name"
        )
        return {name: Mode(mode) for name, mode in self._query(query, client)}

    def key(self, client: str) -> bytes | None:
        """Return a client's key; None if there is no such client."""
        found = self._query("SELECT key FROM clients WHERE name = ?", client)
        return found[0][0] if found else None

    def is_admin(self, client: str) -> bool:
        """Return whether a client may do everything; False if there is no such client."""
        return self._query("SELECT admin FROM clients WHERE name = ?", client) == [(1,)]

    def mode(self, client: str, volume: int) -> Mode:
        """Return a client's right to a volume: `Mode.ADMIN` for an admin, `Mode.NONE` for a client without a right."""
        if self.is_admin(client):
            return Mode.ADMIN
        query = "SELECT mode FROM rights WHERE client = ? AND volume = ?"
        found = self._query(query, client, volume)
        return Mode(found[0][0]) if found else Mode.NONE

    def version(self) -> int:
        """Return a number that changes whenever another process changes the database."""
        return int(self._query("PRAGMA data_version")[0][0])


def check_size(size: int) -> None:
    """Check that a volume can have this size.

    :param size: size in bytes.
    :raises InvalidError: the size is not a multiple of the block size, or is too small or too large.
    """
    if size < BLOCK or size > _LARGEST or size % BLOCK:
        raise InvalidError(
            f"a volume's size must be whole blocks of {BLOCK:,} bytes, from one to 2**50 bytes, got {size:,}"
        )
