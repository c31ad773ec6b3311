"""Two traits of what owns memory: `with` closes it, and it is one object of one process."""

from typing import NoReturn, Self


class Closing:
    """Closed at the end of a `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unique:
    """Neither pickled nor copied. Raises: TypeError."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can be neither pickled nor copied: its memory belongs to this process and this object; "
            "fork() copies a sequence, and handles are exported by the driver"
        )
