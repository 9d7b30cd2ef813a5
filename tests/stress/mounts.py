"""Real file systems that can be filled, turned read-only and broken, where the machine lets us mount them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


def run(*command: str) -> str:
    """Run a system command; skip the test if this machine does not allow or have it."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory of a few bytes."""
    folder.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def remount(place: Path, how: str) -> None:
    """Mount what is mounted with other options."""
    run("mount", "-o", f"remount,{how}", str(place))


class Disk:
    """An ext4 disk in a file.

    Args:
        folder: where its file and its mount point are made.
    """

    def __init__(self, folder: Path) -> None:
        self._image, self.place = folder / "disk.img", folder / "disk"
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(32 << 20)
        run("mkfs.ext4", "-q", str(self._image))

    def mount(self) -> None:
        """Mount it, with nothing of it in the page cache."""
        run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.place))

    def unmount(self) -> None:
        """Unmount it, even if files are open after some seconds; then it is not gone, only out of sight."""
        for _ in range(50):
            gc.collect()  # what is mapped is open
            if subprocess.run(["umount", str(self.place)], check=False, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        subprocess.run(["umount", "--lazy", str(self.place)], check=False)

    def give_up_writing(self) -> None:
        """Make it read-only under the hands of its users, as the kernel does when it finds it damaged."""
        run("mount", "-o", "remount,abort", str(self.place))

    def lose_sectors(self, paths: Sequence[Path], after_pages: int) -> None:
        """Let reading fail from a page on in the first of some files, and everywhere behind it on the disk."""
        extents = [run("filefrag", "-v", "-b4096", str(path)).splitlines()[3] for path in paths]
        first = min(int(extent.split()[3].rstrip(".:")) for extent in extents)
        os.truncate(self._image, (first + after_pages) * 4096)


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Make and mount a disk."""
    made = Disk(folder)
    made.mount()
    try:
        yield made
    finally:
        made.unmount()
