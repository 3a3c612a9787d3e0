"""What was computed once: JSON entries in diskcache, and blobs in files named by their sha256.

A store may lose anything and then is merely slower; it never raises and never changes an answer. Entries
are bytes of JSON with a checksum, so a truncated, altered or planted one is a miss, and nothing in it is
ever unpickled: diskcache by itself unpickles whatever a row claims to be (CVE-2025-69872).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import diskcache
from diskcache.core import DEFAULT_SETTINGS, METADATA, MODE_RAW

from optiml import codec

FORMULA_VERSION = 1  # raise it when a formula of ours changes what the same kernel and problem yield

_LOG = logging.getLogger(__name__)
_BUSY_TIMEOUT_S = 2.0  # for another process to finish its write
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKED = re.compile(rb'\["([0-9a-f]{64})",(.*)\]', re.DOTALL)
_TEMPORARY = ".part-"
_CACHE_PAGES = 2048  # of 4 KiB, per connection and so per thread: diskcache itself would let each grow to 32 MiB
_ABANDONED_S = 3600.0  # a temporary file this old has no writer
_ENTRY_SHARE = 0.5  # of the size limit; blobs get the rest
_EVICT_TO = 0.8  # of the limit, so that not every write evicts

# What a damaged or hostile database makes sqlite3 and diskcache raise.
_DATABASE_ERRORS = (sqlite3.Error, diskcache.Timeout, OSError, ValueError, TypeError, KeyError, AttributeError)

# Primary result codes of SQLite that say nothing about what is stored: permission, busy, locked, out of memory,
# read-only, I/O error, full, cannot open, not authorised.
_PASSING_CODES = frozenset({3, 5, 6, 7, 8, 10, 13, 14, 23})
_STARTED_ANEW = "the cache was damaged and has been started anew ({})"

T = TypeVar("T")


def cache_key(kind: str, **parts: object) -> str:
    """The name of a result: sha256 over its kind, every part, and the version of our formulas.

    Args:
        kind: what is kept ("build", "verdict", "profile").
        parts: all that the result depends on; records, JSON values and nestings of them.

    Raises:
        TypeError, ValueError: a part that JSON cannot hold.
    """
    return codec.digest({"kind": kind, "formula_version": FORMULA_VERSION, "parts": parts})


def open_store(folder: str | os.PathLike[str], *, size_limit_bytes: int) -> Store:
    """Open the store in `folder`, made with private access if it does not exist. Never fails: see `Store.warnings`."""
    return Store(Path(folder), size_limit_bytes=size_limit_bytes)


class JsonBytes(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Keys are text and values bytes inside the row; every other kind of row is refused unread."""

    def put(self, key: object) -> tuple[str, bool]:
        if not isinstance(key, str):
            raise TypeError("a store key is text")
        return key, True

    def get(self, key: object, raw: bool) -> str:
        if not raw or not isinstance(key, str):
            raise ValueError("a stored key is not text")
        return key

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, sqlite3.Binary]:
        if read or not isinstance(value, bytes):
            raise TypeError("a stored value is bytes")
        return 0, MODE_RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: int, filename: object, value: object, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or read or not isinstance(value, bytes):
            raise OSError("a stored value is not bytes")  # which diskcache takes for a missing one
        return value

    def remove(self, file_path: str) -> None:
        """Nothing: our rows have no files, and a planted row may name any."""


class Store:
    """Entries and blobs of one folder. Safe to share between threads and between processes."""

    def __init__(self, folder: Path, *, size_limit_bytes: int) -> None:
        self._folder = folder
        self._entry_limit_bytes = int(size_limit_bytes * _ENTRY_SHARE)
        self._blob_limit_bytes = size_limit_bytes - self._entry_limit_bytes
        self._blob_bytes: int | None = None  # unknown until the first write
        self._warnings: dict[str, None] = {}
        self._lock = threading.Lock()
        self._cache: diskcache.Cache | None = None
        self._usable = self._make_folders()
        if self._usable:
            self._cache = self._open_entries()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be kept or read so far, each once; without paths, these are in the log."""
        return tuple(self._warnings)

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of `key`, or None if there is none that can be trusted."""
        data = self._with_entries(lambda cache: cache.get(key), "cached results cannot be read")
        return None if data is None else _unsealed(key, data)

    def put(self, key: str, value: dict[str, Any]) -> bool:
        """Keep `value` under `key`, replacing what is there; False, with a warning, if that failed."""
        try:
            data = _sealed(key, value)
        except (TypeError, ValueError, RecursionError) as error:
            self._warn(f"not cached: a result is not plain JSON ({error})")
            return False
        return bool(self._with_entries(lambda cache: cache.set(key, data), "not cached: the store cannot be written"))

    def put_blob(self, data: bytes) -> str | None:
        """Keep `data` and return its sha256 in hexadecimal; None, with a warning, if that failed."""
        digest = hashlib.sha256(data).hexdigest()
        if not self._usable:
            return None
        try:
            if self.get_blob(digest) is None:
                self._publish(digest, data)
                self._make_room(len(data))
        except OSError as error:
            self._warn(f"not cached: the store cannot be written ({error.strerror})")
            return None
        return digest

    def get_blob(self, digest: str) -> bytes | None:
        """The blob of that sha256, or None; one that does not match its name is removed."""
        if not self._usable or _DIGEST.fullmatch(digest) is None:
            return None
        try:
            with self._blob_folder() as folder:
                descriptor = os.open(digest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                with open(descriptor, "rb") as file:
                    data = file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
                if hashlib.sha256(data).hexdigest() == digest:
                    return data
                os.unlink(digest, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:  # also what opening a symbolic link answers
            _LOG.info("a blob cannot be read: %s", error)
        return None

    def close(self) -> None:
        """Close the database connection of this thread; those of other threads close as they end."""
        if self._cache is not None:
            self._cache.close()

    # --- entries ---

    def _with_entries(self, action: Callable[[diskcache.Cache], T], failure: str) -> T | None:
        """Do something with the database; a damaged one is replaced, and then it is done with the empty one."""
        for _ in range(2):
            if self._cache is None:
                return None
            try:
                return action(self._cache)
            except _DATABASE_ERRORS as error:
                if not _is_damage(error):
                    self._warn(f"{failure} ({_told(error)})")
                    return None
                self._warn(_STARTED_ANEW.format(_told(error)))
                with self._lock:
                    self.close()
                    self._discard_entries()
                    self._cache = self._open_entries()
        return None

    def _open_entries(self) -> diskcache.Cache | None:
        try:
            try:
                return self._opened_entries()
            except _DATABASE_ERRORS as error:
                if not _is_damage(error):
                    raise
                self._warn(_STARTED_ANEW.format(_told(error)))
                self._discard_entries()
                return self._opened_entries()
        except _DATABASE_ERRORS as error:
            _LOG.warning("no cache in %s: %s", self._folder, error)
            self._warn(f"nothing is cached: the store cannot be opened ({_told(error)})")
            return None

    def _opened_entries(self) -> diskcache.Cache:
        folder = self._folder / "entries"
        database = folder / "cache.db"
        if database.is_symlink() or database.is_fifo():
            database.unlink()
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        _examine(database)
        return diskcache.Cache(
            str(folder),
            timeout=_BUSY_TIMEOUT_S,
            disk=JsonBytes,
            size_limit=self._entry_limit_bytes,
            cull_limit=64,
            eviction_policy="least-recently-stored",
            statistics=0,
            tag_index=0,
            sqlite_cache_size=_CACHE_PAGES,
            sqlite_mmap_size=0,  # another process that truncates a mapped file would end us with SIGBUS
        )

    def _discard_entries(self) -> None:
        for name in ("cache.db", "cache.db-wal", "cache.db-shm", "cache.db-journal"):
            with contextlib.suppress(OSError):
                os.unlink(self._folder / "entries" / name)

    # --- blobs ---

    @contextlib.contextmanager
    def _blob_folder(self) -> Iterator[int]:
        folder = os.open(self._folder / "blobs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)

    def _publish(self, digest: str, data: bytes) -> None:
        temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        with self._blob_folder() as folder:
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
            )
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(descriptor)
                os.replace(temporary, digest, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            os.fsync(folder)

    def _make_room(self, added_bytes: int) -> None:
        """Drop the oldest blobs once they are over their limit; other processes' writes count from the next scan on."""
        with self._lock:
            if self._blob_bytes is not None and self._blob_bytes + added_bytes <= self._blob_limit_bytes:
                self._blob_bytes += added_bytes
                return
            with self._blob_folder() as folder:
                files = []
                for name in os.listdir(folder):
                    with contextlib.suppress(FileNotFoundError):  # another process makes room too
                        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        files.append((about.st_mtime, about.st_size, name))
                total = sum(size for _, size, _ in files)
                goal = total if total <= self._blob_limit_bytes else self._blob_limit_bytes * _EVICT_TO
                for modified_s, size, name in sorted(files):
                    abandoned = name.startswith(_TEMPORARY) and time.time() - modified_s > _ABANDONED_S
                    if abandoned or (total > goal and not name.startswith(_TEMPORARY)):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=folder)
                        total -= size
            self._blob_bytes = total

    # --- both ---

    def _make_folders(self) -> bool:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("entries", "blobs"):
                part = self._folder / name
                if part.is_symlink():
                    part.unlink()
                part.mkdir(mode=0o700, exist_ok=True)
                if part.stat().st_mode & 0o077:
                    part.chmod(0o700)
        except OSError as error:
            _LOG.warning("no store in %s: %s", self._folder, error)
            self._warn(f"nothing is cached: the store cannot be made ({error.strerror}); set OPTIML_HOME to a folder")
            return False
        return True

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            _LOG.warning("%s", message)
            self._warnings[message] = None


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)  # absent from what the Python module itself finds wrong
        return code is not None and code & 0xFF not in _PASSING_CODES
    return not isinstance(error, OSError | diskcache.Timeout)


def _told(error: BaseException) -> str:
    """What went wrong, without the paths that an OSError names."""
    if isinstance(error, diskcache.Timeout):
        return "another process is writing"
    return error.strerror or "no reason given" if isinstance(error, OSError) else str(error)


def _sealed(key: str, value: dict[str, Any]) -> bytes:
    """`["<checksum>",<value>]`: the checksum covers the key too, so that a row cannot answer for another."""
    payload = codec.canonical(value).encode("utf-8")
    return b'["%s",%s]' % (_checksum(key, payload), payload)


def _unsealed(key: str, data: bytes) -> dict[str, Any] | None:
    parts = _CHECKED.fullmatch(data)
    if parts is None or parts[1] != _checksum(key, parts[2]):
        return None
    value = json.loads(parts[2])
    return value if isinstance(value, dict) else None


def _checksum(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode("utf-8") + b"\n" + payload).hexdigest().encode("ascii")


def _examine(database: Path) -> None:
    """Refuse a database that is damaged, or whose settings diskcache would take for attributes of its own.

    It also answers within the busy time limit, where diskcache would try to open it for a minute.

    Raises:
        sqlite3.Error: it cannot be read or written now.
        ValueError: it is not one that we made.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "Settings" in tables:
            names = {name for (name,) in connection.execute("SELECT key FROM Settings")}
            if not names <= set(DEFAULT_SETTINGS) | set(METADATA):
                raise ValueError("its settings are not ours")
        connection.execute("ROLLBACK")
