"""Disks that lose power, fill up and are replaced.

``ImageDisk`` is an ext4 filesystem in a file, mounted through a loop device. ``lose_power`` shuts the mounted
filesystem down the way the crash tests of the kernel's own filesystems do (``FS_IOC_SHUTDOWN`` without
flushing its journal): from that moment nothing more reaches the image, and what no sync has asked for is
gone when it is mounted again. The kernel may have written some unsynced pages before, as it may on any
machine.

``FolderDisk`` is for machines that do not let this process mount: a plain directory. The broker's own process
then holds unsynced writes back in its memory (``broker_child``), so that SIGKILL loses them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

_SHUTDOWN: Final = 0x8004587D
_WITHOUT_JOURNAL: Final = struct.pack("I", 2)
_UMOUNT_S: Final = 20.0
BALLAST: Final = "ballast"
_IMAGES: Final = "sava-torture-"


class NoMounts(Exception):
    """The machine does not let this process mount a disk image."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise NoMounts(f"{' '.join(command)}: {done.stderr.strip()}")


class ImageDisk:
    """One host's disk. ``path`` is where it is mounted while it is there."""

    holds_back: Final = False

    def __init__(self, name: str, mounts: Path, images: Path, *, megabytes: int) -> None:
        """Raises NoMounts."""
        self.path = mounts / name
        self._image = images / f"{name}.img"
        self._megabytes = megabytes
        self.path.mkdir(parents=True)
        self._format()

    def _format(self) -> None:
        self._image.unlink(missing_ok=True)
        with self._image.open("wb") as image:
            image.truncate(self._megabytes << 20)
        try:
            # Little is written ahead, so that a power loss finds much that is unsynced.
            _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^metadata_csum_seed", str(self._image))
        except FileNotFoundError as error:
            raise NoMounts("mkfs.ext4 is not there") from error
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop,noatime,commit=300", str(self._image), str(self.path))

    def _unmount(self) -> None:
        """A process that was just killed may take a moment to let go."""
        deadline = time.monotonic() + _UMOUNT_S
        while True:
            try:
                _run("umount", str(self.path))
                return
            except NoMounts:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def cut_power(self) -> None:
        """From now on nothing reaches the image. The host's processes must be dead or die now."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _WITHOUT_JOURNAL)
        finally:
            os.close(descriptor)

    def return_power(self) -> None:
        self._unmount()
        self._mount()

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self._unmount()
        self._format()

    def fill(self) -> None:
        """Leave no room."""
        descriptor = os.open(self.path / BALLAST, os.O_RDWR | os.O_CREAT)
        try:
            size, step = os.fstat(descriptor).st_size, 16 << 20
            while step >= 4096:
                try:
                    os.posix_fallocate(descriptor, size, step)
                    size += step
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 4
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        (self.path / BALLAST).unlink(missing_ok=True)

    def used(self) -> int:
        """Bytes."""
        about = os.statvfs(self.path)
        return (about.f_blocks - about.f_bfree) * about.f_frsize

    def close(self) -> None:
        self._unmount()
        self._image.unlink(missing_ok=True)


class FolderDisk:
    """A directory. With ``holds_back`` the host's process keeps unsynced writes to itself."""

    def __init__(self, name: str, mounts: Path, *, holds_back: bool) -> None:
        self.holds_back = holds_back
        self.path = mounts / name
        self.path.mkdir(parents=True)

    def cut_power(self) -> None:
        """The unsynced writes went with the process."""

    def return_power(self) -> None:
        """Nothing was unmounted."""

    def wipe(self) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()

    def used(self) -> int:
        found = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    found += (Path(folder) / name).stat().st_blocks * 512
                except FileNotFoundError:
                    continue
        return found

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


Disk = ImageDisk | FolderDisk


def room_for_images(directory: Path) -> Path:
    """Where images lie: in memory where there is much of it, for a sync of a loop device is slow on a disk
    that others use."""
    memory = Path("/dev/shm")
    images = directory / "images"
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        _sweep(memory)
        images = memory / f"{_IMAGES}{os.getpid()}"
    images.mkdir()
    return images


def _sweep(memory: Path) -> None:
    """Remove the images of runs that were killed: nothing else frees their memory."""
    for left in memory.glob(f"{_IMAGES}*"):
        if not Path("/proc", left.name.removeprefix(_IMAGES)).exists():
            shutil.rmtree(left, ignore_errors=True)
