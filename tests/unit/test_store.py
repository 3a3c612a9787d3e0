import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import diskcache
import pytest
from diskcache.core import MODE_BINARY, MODE_PICKLE, MODE_TEXT

from optiml import store as store_module
from optiml.store import Store, cache_key, open_store

KEY = cache_key("verdict", kernel="k")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with open_store(folder, size_limit_bytes=1 << 30) as opened:
        yield opened


def reopened(folder: Path) -> Store:
    return open_store(folder, size_limit_bytes=1 << 30)


def rows(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / "entries" / "cache.db")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (str(self.path), "w")


# --- entries ---


def test_an_entry_is_read_back_also_after_reopening(folder: Path, store: Store) -> None:
    value = {"status": "accepted", "numbers": [1, 2.5, None], "text": "naïve ∑", "nested": {"a": {}}}
    assert store.get(KEY) is None
    assert store.put(KEY, value)
    assert store.get(KEY) == value
    with reopened(folder) as again:
        assert again.get(KEY) == value
    assert store.warnings == ()


def test_the_newest_value_of_a_key_wins(store: Store) -> None:
    store.put(KEY, {"n": 1})
    store.put(KEY, {"n": 2})
    assert store.get(KEY) == {"n": 2}


@pytest.mark.parametrize("as_file", [False, True])
def test_a_planted_pickle_is_never_unpickled_but_a_miss_that_can_be_replaced(
    folder: Path, store: Store, tmp_path: Path, as_file: bool
) -> None:
    store.put(KEY, {"n": 1})
    created = tmp_path / "created by the payload"
    data = pickle.dumps(Payload(created))
    (folder / "entries" / "planted.val").write_bytes(data)
    with rows(folder) as planted:
        filename, value = ("planted.val", None) if as_file else (None, data)
        planted.execute("UPDATE Cache SET mode = ?, filename = ?, value = ?", (MODE_PICKLE, filename, value))
    planted.close()
    with diskcache.Cache(folder / "entries") as naive:  # the library itself runs the payload
        naive.get(KEY)
    assert created.exists()
    created.unlink()

    assert store.get(KEY) is None
    with reopened(folder) as again:
        assert again.get(KEY) is None
        assert again.put(KEY, {"n": 2})
        assert again.get(KEY) == {"n": 2}
    assert not created.exists()


@pytest.mark.parametrize("mode", [MODE_BINARY, MODE_TEXT])
def test_a_row_that_names_a_file_is_a_miss_and_the_file_is_not_touched(
    folder: Path, store: Store, tmp_path: Path, mode: int
) -> None:
    store.put(KEY, {"n": 1})
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with rows(folder) as planted:
        planted.execute("UPDATE Cache SET mode = ?, filename = ?, value = NULL", (mode, "../../victim"))
    planted.close()
    assert store.get(KEY) is None
    assert store.put(KEY, {"n": 2})
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "damaged",
    [b"", b"{", b'{"n": 1}', b"[]", b"\xff\xfe", "text", 5, None, 2.5, b'["' + b"0" * 64 + b'",{"n":2}]'],
    ids=repr,
)
def test_a_damaged_entry_is_a_miss_and_replaced(folder: Path, store: Store, damaged: object) -> None:
    store.put(KEY, {"n": 1})
    with rows(folder) as planted:
        planted.execute("UPDATE Cache SET value = ?", (damaged,))
    planted.close()
    assert store.get(KEY) is None
    assert store.put(KEY, {"n": 2})
    assert store.get(KEY) == {"n": 2}


def test_one_changed_character_makes_an_entry_a_miss(folder: Path, store: Store) -> None:
    store.put(KEY, {"median_us": 12.5})
    with rows(folder) as planted:
        ((value,),) = planted.execute("SELECT value FROM Cache").fetchall()
        planted.execute("UPDATE Cache SET value = ?", (value.replace(b"12.5", b"11.5"),))
    planted.close()
    assert store.get(KEY) is None


def test_a_row_cannot_answer_for_another_key(folder: Path, store: Store) -> None:
    store.put(KEY, {"status": "accepted"})
    other = cache_key("verdict", kernel="another")
    with rows(folder) as planted:
        planted.execute("UPDATE Cache SET key = ?", (other,))
    planted.close()
    assert store.get(other) is None


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty", "a symbolic link", "foreign tables", "settings"])
def test_a_damaged_database_is_replaced(folder: Path, tmp_path: Path, damage: str) -> None:
    with reopened(folder) as store:
        for number in range(200):
            store.put(cache_key("build", n=number), {"n": number, "filler": "x" * 500})
    database = folder / "entries" / "cache.db"
    whole = database.read_bytes()
    outside = tmp_path / "outside.db"
    if damage == "garbage":
        database.write_bytes(b"not a database" * 1000)
    elif damage == "truncated":
        database.write_bytes(whole[: len(whole) // 2 + 7])
    elif damage == "empty":
        database.write_bytes(b"")
    elif damage == "a symbolic link":
        outside.write_bytes(whole)
        database.unlink()
        database.symlink_to(outside)
    elif damage == "foreign tables":
        database.unlink()
        with rows(folder) as foreign:
            foreign.execute("CREATE TABLE Cache (something)")
        foreign.close()
    else:
        with rows(folder) as hostile:
            hostile.execute("INSERT INTO Settings VALUES ('get', 'not a method any more')")
        hostile.close()
    with reopened(folder) as store:
        store.get(KEY)
        assert store.put(KEY, {"n": 1})
        assert store.get(KEY) == {"n": 1}
    assert not database.is_symlink()
    if damage == "a symbolic link":
        assert outside.read_bytes() == whole


def test_a_database_damaged_while_open_is_replaced_and_the_answer_is_kept(folder: Path, store: Store) -> None:
    store.put(KEY, {"n": 1})
    with rows(folder) as vandal:
        vandal.execute("DROP TABLE Cache")
    vandal.close()
    assert store.get(KEY) is None
    assert store.put(KEY, {"n": 2})
    assert store.get(KEY) == {"n": 2}
    assert "damaged" in store.warnings[0]


def test_a_value_that_json_cannot_hold_is_not_kept_and_said(store: Store) -> None:
    assert not store.put(KEY, {"x": {1, 2}})
    assert not store.put(KEY, {"x": "\ud800"})
    assert store.get(KEY) is None
    assert "not plain JSON" in store.warnings[0]


def test_entries_and_folders_are_private(folder: Path, store: Store) -> None:
    store.put(KEY, {"n": 1})
    store.put_blob(b"x")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


def test_the_oldest_entries_make_room_for_new_ones(folder: Path) -> None:
    with open_store(folder, size_limit_bytes=1 << 20) as store:
        keys = [cache_key("build", n=number) for number in range(300)]
        for number, key in enumerate(keys):
            assert store.put(key, {"n": number, "filler": "x" * 10_000})
        assert store.get(keys[0]) is None
        assert store.get(keys[-1]) is not None
    assert sum(path.stat().st_size for path in (folder / "entries").iterdir()) < 8 << 20


# --- places that cannot be written ---


def test_a_folder_that_cannot_be_made_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING), open_store(tmp_path / "file" / "store", size_limit_bytes=1 << 20) as store:
        assert store.get(KEY) is None
        assert not store.put(KEY, {"n": 1})
        assert store.put_blob(b"x") is None
        assert store.get_blob(hashlib.sha256(b"x").hexdigest()) is None
    assert "nothing is cached" in store.warnings[0]
    assert str(tmp_path) not in store.warnings[0]
    assert str(tmp_path) in caplog.text


FULL_DISK = """
import json, resource, sys
from optiml.store import open_store
store = open_store(sys.argv[1], size_limit_bytes=1 << 30)
assert store.put("before", {"n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
said = [store.put("after", {"n": "x" * 3_000_000}), store.put_blob(b"y" * 3_000_000), store.get("before")]
print(json.dumps([said, store.warnings]))
"""


def test_a_full_disk_costs_a_warning_only_and_what_was_kept_before_stays(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, folder, str(1 << 20)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, warnings = json.loads(done.stdout)
    assert said == [False, None, {"n": 1}]
    assert all("not cached" in warning for warning in warnings)
    with reopened(folder) as store:
        assert store.get("before") == {"n": 1}
        assert store.put("after", {"n": 2})
    assert [path.name for path in (folder / "blobs").iterdir()] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write any folder")
def test_a_read_only_folder_costs_a_warning_only(folder: Path) -> None:
    with reopened(folder) as store:
        store.put(KEY, {"n": 1})
    for path in (folder / "entries" / "cache.db", folder / "entries", folder / "blobs"):
        path.chmod(0o500)
    with reopened(folder) as store:
        assert not store.put(KEY, {"n": 2})
        assert store.put_blob(b"x") is None
        assert store.warnings


def test_a_database_that_another_process_holds_is_waited_for_only_so_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUSY_TIMEOUT_S", 0.05)
    with reopened(folder) as store:
        store.put(KEY, {"n": 1})
        holder = rows(folder)
        holder.isolation_level = None
        holder.execute("BEGIN EXCLUSIVE")
        assert not store.put(KEY, {"n": 2})
        assert store.get(KEY) == {"n": 1}
        with reopened(folder) as second:
            assert second.get(KEY) is None
            assert not second.put(KEY, {"n": 3})
            assert "nothing is cached" in second.warnings[0]
        holder.execute("ROLLBACK")
        holder.close()
        assert store.put(KEY, {"n": 4})


# --- two at once ---


def write_many(folder: Path, start: "multiprocessing.synchronize.Barrier", number: int) -> None:
    start.wait()
    with open_store(folder, size_limit_bytes=1 << 30) as store:
        for turn in range(50):
            assert store.put("shared", {"writer": number, "filler": str(number) * 2000})
            assert store.put(f"own {number} {turn}", {"turn": turn})
            assert store.put_blob(b"same bytes" * 1000) is not None
        assert store.warnings == ()


def test_two_processes_share_one_store(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    writers = [context.Process(target=write_many, args=(folder, start, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    with reopened(folder) as store:
        shared = store.get("shared")
        assert shared is not None
        assert shared["filler"] == str(shared["writer"]) * 2000
        assert all(store.get(f"own {number} {turn}") == {"turn": turn} for number in range(2) for turn in range(50))
    assert len(list((folder / "blobs").iterdir())) == 1


# --- blobs ---


def test_a_blob_is_found_by_its_digest(folder: Path, store: Store) -> None:
    data = bytes(range(256)) * 1000
    digest = store.put_blob(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert store.get_blob(digest) == data
    assert store.put_blob(data) == digest
    assert reopened(folder).get_blob(digest) == data


@pytest.mark.parametrize("damage", ["changed", "truncated", "empty", "a symbolic link", "a fifo", "a folder"])
def test_a_damaged_blob_is_a_miss_and_replaced(folder: Path, store: Store, tmp_path: Path, damage: str) -> None:
    digest = store.put_blob(b"cubin")
    assert digest is not None
    path = folder / "blobs" / digest
    path.unlink()
    (tmp_path / "outside").write_bytes(b"cubin")
    if damage == "a symbolic link":
        path.symlink_to(tmp_path / "outside")
    elif damage == "a fifo":
        os.mkfifo(path)
    elif damage == "a folder":
        path.mkdir()
    else:
        path.write_bytes({"changed": b"evil!", "truncated": b"cub", "empty": b""}[damage])
    assert store.get_blob(digest) is None
    if damage == "a folder":
        assert store.put_blob(b"cubin") is None
        assert "not cached" in store.warnings[0]
    else:
        assert store.put_blob(b"cubin") == digest
        assert store.get_blob(digest) == b"cubin"
        assert not path.is_symlink()
    assert (tmp_path / "outside").read_bytes() == b"cubin"


@pytest.mark.parametrize("digest", ["", "../entries/cache.db", "A" * 64, "0" * 63, "0" * 64 + "\n", "0" * 64])
def test_what_is_no_digest_of_a_blob_finds_nothing(store: Store, digest: str) -> None:
    assert store.get_blob(digest) is None


def test_the_oldest_blobs_make_room_for_new_ones(folder: Path) -> None:
    with open_store(folder, size_limit_bytes=200_000) as store:
        digests = []
        for number in range(40):
            digest = store.put_blob(bytes([number]) * 10_000)
            assert digest is not None
            os.utime(folder / "blobs" / digest, (number, number))
            digests.append(digest)
        assert store.get_blob(digests[0]) is None
        assert store.get_blob(digests[-1]) is not None
    assert sum(path.stat().st_size for path in (folder / "blobs").iterdir()) <= 110_000


# --- keys ---


def test_a_key_differs_if_any_part_does(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, object] = {
        "source": "a", "params": {"BLOCK": 256}, "flags": ["-lineinfo"], "arch": "sm_80", "compiler": "nvrtc 13.5",
        "problem": "d", "device": {"name": "x"}, "tools": None,
    }  # fmt: skip
    changes: dict[str, object] = {
        "source": "b", "params": {"BLOCK": 256.0}, "flags": [], "arch": "sm_90", "compiler": "nvrtc 13.6",
        "problem": "e", "device": {"name": "y"}, "tools": "",
    }  # fmt: skip
    keys = {cache_key("build", **parts), cache_key("profile", **parts), cache_key("build", **parts, more=None)}
    keys |= {cache_key("build", **{**parts, name: value}) for name, value in changes.items()}
    monkeypatch.setattr(store_module, "FORMULA_VERSION", store_module.FORMULA_VERSION + 1)
    keys.add(cache_key("build", **parts))
    assert len(keys) == 3 + len(changes) + 1


def test_a_key_does_not_depend_on_the_order_of_parts() -> None:
    assert cache_key("build", a=1, b={"x": 1, "y": 2}) == cache_key("build", b={"y": 2, "x": 1}, a=1)


def test_a_part_that_json_cannot_hold_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError):
        cache_key("build", source=b"bytes")
