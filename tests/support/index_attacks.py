"""Ways to destroy the index of a store while programs use it. Each gets the index's folder."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

OLD = "older.db"


def delete_file(index: Path) -> None:
    (index / "cache.db").unlink()


def delete_all_files(index: Path) -> None:
    for path in index.iterdir():
        path.unlink()


def delete_folder(index: Path) -> None:
    shutil.rmtree(index)


def delete_log(index: Path) -> None:
    for path in index.glob("cache.db-*"):
        path.unlink()


def rename_folder(index: Path) -> None:
    index.rename(index.with_name("moved"))


def replace_by_text(index: Path) -> None:
    delete_all_files(index)
    (index / "cache.db").write_bytes(b"no database" * 1000)


def replace_by_empty_database(index: Path) -> None:
    delete_all_files(index)
    (index / "cache.db").touch()


def replace_by_older_copy(index: Path) -> None:
    delete_all_files(index)
    shutil.copy(index.parent / OLD, index / "cache.db")


def overwrite_with_text(index: Path) -> None:
    with open(index / "cache.db", "r+b") as file:
        file.write(b"no database" * 10_000)


def overwrite_with_older_copy(index: Path) -> None:
    (index / "cache.db").write_bytes((index.parent / OLD).read_bytes())


def cut_to_nothing(index: Path) -> None:
    os.truncate(index / "cache.db", 0)


def cut_in_half(index: Path) -> None:
    os.truncate(index / "cache.db", (index / "cache.db").stat().st_size // 2)


def drop_table(index: Path) -> None:
    with sqlite3.connect(index / "cache.db") as database:
        database.execute("DROP TABLE Cache")
    database.close()


def delete_rows(index: Path) -> None:
    with sqlite3.connect(index / "cache.db") as database:
        database.execute("DROP INDEX Cache_worth")
        database.execute("DELETE FROM Cache")
        database.execute("PRAGMA user_version = 0")
    database.close()


ATTACKS = [
    delete_file,
    delete_all_files,
    delete_folder,
    delete_log,
    rename_folder,
    replace_by_text,
    replace_by_empty_database,
    replace_by_older_copy,
    overwrite_with_text,
    overwrite_with_older_copy,
    cut_to_nothing,
    cut_in_half,
    drop_table,
    delete_rows,
]


def keep_older_copy(folder: Path) -> None:
    with sqlite3.connect(folder / "index" / "cache.db") as source, sqlite3.connect(folder / OLD) as target:
        source.backup(target)
    source.close()
    target.close()
