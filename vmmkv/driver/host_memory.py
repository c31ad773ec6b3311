"""How much memory this process can still take: that of the machine, and of each control group around the process.

The kernel's answer to shared memory that does not fit is the out-of-memory killer and not an error, so it must be asked
before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmmkv.driver.base import MemoryInfo
from vmmkv.units import KIB

_CGROUP_ROOTS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_CGROUP_V1_ROOT: Final = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True)
class _Group:
    """One control group with a memory limit, by the files that tell."""

    limit_bytes: int
    usage: Path
    stat: Path
    stat_prefix: str

    def free_bytes(self) -> int:
        """What the group may still take; its cached files count as free, since the kernel drops them first."""
        try:
            kept = dict(line.split(maxsplit=1) for line in self.stat.read_text().splitlines())
            usage_bytes = int(self.usage.read_text())
        except OSError:  # the process was moved to another group, and this one is gone
            return self.limit_bytes
        cached_bytes = sum(int(kept.get(self.stat_prefix + name, 0)) for name in ("inactive_file", "active_file"))
        return self.limit_bytes - usage_bytes + cached_bytes


class HostMemory:
    """Free and total memory as this process may use it. Limits are read once, when it is made; usage at each call."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._meminfo = proc / "meminfo"
        self._machine_bytes = self._read_machine().total_bytes
        self._groups = tuple(group for group in _groups(proc) if group.limit_bytes < self._machine_bytes)

    def read(self) -> MemoryInfo:
        """Cost: one small file, and two for each control group with a limit: some 30 us in all."""
        free_bytes, total_bytes = self._read_machine()
        for group in self._groups:
            free_bytes, total_bytes = min(free_bytes, group.free_bytes()), min(total_bytes, group.limit_bytes)
        return MemoryInfo(max(0, free_bytes), total_bytes)

    def _read_machine(self) -> MemoryInfo:
        fields = dict(line.split(":", 1) for line in self._meminfo.read_text().splitlines())
        free, total = (int(fields[name].split()[0]) * KIB for name in ("MemAvailable", "MemTotal"))
        return MemoryInfo(free, total)


def _groups(proc: Path) -> Iterator[_Group]:
    """The control groups around this process that have a limit, from its own outwards."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        relative = Path(path.lstrip("/"))
        # A container may see its own group as the root while /proc still shows the host's path: then that path is
        # not there, and walking up from it ends at the root that is.
        for level in (relative, *relative.parents):
            if number == "0":
                for root in _CGROUP_ROOTS:
                    yield from _group(root / level, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                yield from _group(_CGROUP_V1_ROOT / level, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _group(folder: Path, limit: str, usage: str, stat_prefix: str) -> Iterator[_Group]:
    try:
        text = (folder / limit).read_text().strip()
    except OSError:
        return
    if text != "max":
        yield _Group(int(text), folder / usage, folder / "memory.stat", stat_prefix)
