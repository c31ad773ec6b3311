"""Storages of views: what becomes of a view that torch saves, pickles, deep-copies or shares with another process.

torch takes a tensor's whole storage for that, whatever part of it the tensor shows:

    all slots    |null|rrrr....|rr......|....|    addresses of an arena, most of them without memory: ReservedStorage
    a sequence        |rrrr|                      its mapped rows, of all layers: MappedStorage

The first is refused by name. Of the second a copy is taken. Which one a storage is, its Python class says: torch keeps that
object with the storage, so that every tensor derived from the view has it, and no operation on tensors takes longer.
"""

import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.serialization import register_package

from vmmkv.errors import ViewNotCloned
from vmmkv.units import format_bytes


class MappedStorage(torch.UntypedStorage):
    """The mapped rows of one sequence. A copy is a plain storage."""

    def clone(self) -> torch.UntypedStorage:
        """A copy in memory of torch's own."""
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self)  # type: ignore[no-untyped-call]

    def share_memory_(self, *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        """Become a copy in shared memory, and a plain storage, with a warning. Nothing on a GPU, as torch has it."""
        if self.device.type == "cpu":
            warnings.warn(
                "share_memory_() copied a sequence's rows: views taken before show the copy, and what is written to them does "
                "not reach the cache. Take a new view to write; view.clone().share_memory_() does not warn",
                stacklevel=4,
            )
            self.__class__ = torch.UntypedStorage  # type: ignore[assignment]
            self.share_memory_(*args, **kwargs)
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.nbytes()} bytes on {self.device}>"  # torch's own shows each byte

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise ViewNotCloned(f"torch cannot pickle storages of fp8: {_REMEDY}")

    def _share_cuda_(self, *_: Any, **__: Any) -> NoReturn:
        raise ViewNotCloned(f"torch cannot send rows of a cache on a GPU to another process: {_REMEDY}")


_REMEDY = "take view.clone()"


class ReservedStorage(MappedStorage):
    """All addresses of an arena. What would read them raises ViewNotCloned."""

    def clone(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise ViewNotCloned(
            f"this is a view over slots of a cache, whose storage is {format_bytes(self.nbytes())} of addresses, most of them "
            f"without memory; torch saves, pickles, deep-copies and shares a whole storage. Copy the rows that there are: "
            f"cache.k(layer)[slot, :length].clone() of a KVCache, or cache.layers[layer].keys.clone() of a VmmCache"
        )

    share_memory_ = __reduce__ = _share_cuda_ = clone

    def cpu(self) -> torch.UntypedStorage:
        """Itself on a CPU, which reads nothing: Triton's interpreter asks for it. Refused on a GPU."""
        return self if self.device.type == "cpu" else self.clone()


def _refuse_to_save(storage: Any) -> None:
    if isinstance(storage, ReservedStorage):
        storage.clone()


def _send(storage: MappedStorage) -> Any:
    return reduce_storage(storage.clone())  # type: ignore[no-untyped-call]


# torch.save asks each package where a storage belongs, in this order; torch's own have 10 and more.
register_package(9, _refuse_to_save, lambda _storage, _location: None)
for each in (MappedStorage, ReservedStorage):
    ForkingPickler.register(each, _send)


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with a MappedStorage. Cost: 1 us."""
    tensor.untyped_storage().__class__ = MappedStorage
    return tensor


def reserved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with a ReservedStorage."""
    tensor.untyped_storage().__class__ = ReservedStorage
    return tensor
