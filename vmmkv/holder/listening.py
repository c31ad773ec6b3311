"""Unix sockets of one user at a path: the lock that keeps other processes from it, and the listener."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from vmmkv.errors import HolderUnavailable


def lock(path: Path) -> int:
    """A descriptor that keeps other processes from a path. The file stays: removing it would let two have it.

    Raises: HolderUnavailable.
    """
    try:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HolderUnavailable(
            f"the socket {path} cannot be made: {error.strerror}; its directory must be there, and this user's to write to"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise HolderUnavailable(f"the socket {path} is in use by process {pid}; take another path") from None
    os.truncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def listen(path: Path) -> socket.socket:
    """A socket at a path that only this user can connect to, and that listens as soon as it is there.

    The caller has the path's lock, so a socket that is left there is stale. Raises: HolderUnavailable.
    """
    listener, bound = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), Path(f"{path}~")
    before = os.umask(0o177)
    try:
        for each in (path, bound):
            if each.is_socket():
                each.unlink()
            elif os.path.lexists(each):
                raise FileExistsError(errno.EEXIST, f"{each} is another file")
        listener.bind(str(bound))
        listener.listen()
        bound.rename(path)
    except OSError as error:
        listener.close()
        raise HolderUnavailable(f"the socket {path} cannot be made: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return listener
