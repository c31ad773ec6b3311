"""KeptBlocks: an engine's cached blocks in memory of a holder process, so that the next engine begins with them.

    cached ──the step that writes it has ended──> sealed ──its block is evicted──> dropped, and its memory may be written
                                                    │
                                                    └── the engine ends ──> next engine: mapped, and cached again

The holder's log has a seal for each handle of a group with sealed blocks, and one for each of these, with the engine's own hash
of it. Nothing of vLLM is imported. The caller holds the memory's lock.
"""

import contextlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self

from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, Run, blocks_of_group
from vmmkv.driver.base import Driver, Fence, Handle
from vmmkv.errors import HolderGone, LogDamaged
from vmmkv.holder import HolderClient, Sealed
from vmmkv.holder.log import LogContents
from vmmkv.units import counted

log = logging.getLogger("vllm.vmmkv")

_PART, _BLOCK = b"part", b"block"
"""Namespaces of the seals of handles and of blocks."""
_FIRST_BLOCK: Final = 1 << 48
"""Serial of block 0's seals in the log. The holder counts its handles from 1."""
_WORD_BYTES: Final = 4


class KeptBlock(NamedTuple):
    """A block that an earlier engine has sealed."""

    block: int
    hash: bytes
    """The engine's own hash of the tokens up to its end."""
    depth: int
    """Number of blocks of the prefix up to its end."""


class Shape(NamedTuple):
    """Sizes of an ElasticBlocks."""

    part_bytes: list[int]
    """Bytes of a group in each run."""
    group_blocks: int
    num_blocks: int

    @classmethod
    def of(cls, runs: Sequence[Run], num_blocks: int) -> Self:
        """The sizes of one with these runs."""
        group_blocks = blocks_of_group((run.stride_bytes for run in runs), num_blocks)
        return cls([group_blocks * run.stride_bytes for run in runs], group_blocks, num_blocks)


class KeptBlocks:
    """Handles of a holder process for an ElasticBlocks, and the blocks whose bytes in them outlive this process.

    `identity` tells apart all by which the bytes of equal hashes differ. Call `find`, make the memory, then call `restore`.
    """

    def __init__(self, driver: Driver, holder: HolderClient, identity: bytes) -> None:
        self._driver, self._holder, self._identity = driver, holder, identity
        self._log: Final = holder.log
        self.creates_zeroed: Final = driver.creates_zeroed
        self._serials: dict[Handle, int] = {}
        self._parts: dict[int, list[Handle]] = {}
        """Handles of each group with sealed blocks, in the order of its runs."""
        self._fresh: dict[int, KeptBlock] = {}
        """Blocks that the step under way writes, or work that was launched before."""
        self._waiting: deque[tuple[Fence, dict[int, KeptBlock]]] = deque()
        self._sealed: dict[int, KeptBlock] = {}
        self._leaves = self._is_full = False

    # the source of an ElasticBlocks' memory

    def create(self, size_bytes: int) -> Handle:
        """A new handle of the holder. Cost: a round trip and an import. Raises: DriverError, HolderGone."""
        serial, fd = self._holder.create(size_bytes)
        try:
            handle = self._driver.import_fd(fd, size_bytes)
        except BaseException:
            self._holder.release([serial])
            raise
        finally:
            os.close(fd)
        self._serials[handle] = serial
        return handle

    def release(self, handle: Handle) -> None:
        """Give a handle up; after `seal_all` it stays with the holder. Raises: DriverError, and then it is still there."""
        self._driver.release(handle)
        serial = self._serials.pop(handle)
        if not self._leaves:
            self._holder.release([serial])

    # from an earlier engine

    def find(self, shape: Shape, budget_bytes: int) -> None:
        """Take over what an earlier engine has sealed, before there is memory for it: see `restore`.

        Of groups beyond the budget those sealed first are freed, and so is all that is of another identity, or damaged: a line
        in the log says so. Room is left for group 0, which is mapped anew first.
        Cost: a round trip for each 128 handles; an import of each. Raises: DriverError.
        """
        contents, held = LogContents(), dict[int, int]()
        try:
            held = self._holder.handles()
            contents = self._log.read()
        except LogDamaged as error:
            self._holder.say_damaged(error)
        except HolderGone:
            pass
        parts, blocks = dict[int, dict[int, int]](), list[KeptBlock]()
        if contents.identity == self._identity:
            parts, blocks = _read(contents, held, shape)
        elif contents.live:
            log.warning(
                "vmmkv: starting cold: the holder at %s has %s of another model, layout or version, and frees them",
                *(self._holder.path, counted(len(held), "handle", ",")),
            )
        group_bytes = sum(shape.part_bytes)
        left = [*dict.fromkeys(block.block // shape.group_blocks for block in reversed(blocks))]
        groups = [group for group in left if group][: budget_bytes // group_bytes - 1] + [group for group in left if not group]
        groups = groups[: self._holder.budget_bytes // group_bytes - 1]
        opened = self._import({serial: held[serial] for group in groups for serial in parts[group].values()})
        self._parts = {
            group: [opened[serial] for _, serial in sorted(parts[group].items())]
            for group in groups
            if opened.keys() >= {*parts[group].values()}
        }
        wanted = {handle for handles in self._parts.values() for handle in handles}
        for handle in {*opened.values()} - wanted:
            self._driver.release(handle)
        self._serials = {handle: serial for serial, handle in opened.items() if handle in wanted}
        self._sealed = {block.block: block for block in blocks if block.block // shape.group_blocks in self._parts}
        self._rewrite()
        self._holder.release([*(held.keys() - {*self._serials.values()})])

    def restore(self, memory: ElasticBlocks) -> tuple[list[int], list[KeptBlock]]:
        """Map what was found; return the blocks that are mapped by it, and those of them with a prefix.

        Cost: two driver calls for each handle. Raises: DriverError.
        """
        self._memory = memory
        added = memory.adopt(self._parts)
        memory.on_unmapped = self._unmapped
        if self._sealed:
            log.info("vmmkv: %s came back from the holder at %s", counted(len(self._sealed), "block", ","), self._holder.path)
        return added, [*self._sealed.values()]

    def _import(self, sizes_bytes: dict[int, int]) -> dict[int, Handle]:
        """Import handles, as far as the holder has them."""
        opened: dict[int, Handle] = {}
        with contextlib.suppress(HolderGone), contextlib.closing(self._holder.open(sizes_bytes)) as found:
            for serial, fd in found:
                try:
                    opened[serial] = self._driver.import_fd(fd, sizes_bytes[serial])
                finally:
                    os.close(fd)
        return opened

    # to the log

    def cached(self, block: int, hash_: bytes, depth: int) -> None:
        """Work that was launched, or will be within the step under way, writes the last bytes of a block."""
        self.dropped(block)
        if hash_ and not len(hash_) % _WORD_BYTES:
            self._fresh[block] = KeptBlock(block, hash_, depth)

    def dropped(self, block: int) -> None:
        """A block is about to be evicted. It may be written when this returns."""
        self._fresh.pop(block, None)
        for _, blocks in self._waiting:
            blocks.pop(block, None)
        if self._sealed.pop(block, None) is not None:
            self._drop(_FIRST_BLOCK + block)

    def seal_written(self) -> None:
        """Between two steps: seal what is written. Never blocks. Cost: a fence, and some 5 us for each block."""
        if self._fresh:
            self._waiting.append((self._memory.fence(), self._fresh))
            self._fresh = {}
        while self._waiting and self._waiting[0][0].done():
            for block in self._waiting.popleft()[1].values():
                self._seal(block)
        if self._log.is_due:
            self._rewrite()

    def void_step(self) -> None:
        """The step under way has failed: what it has cached may not be written."""
        self._fresh.clear()

    def seal_all(self) -> None:
        """The engine ends in order: wait for what was launched, and leave all that is written with the holder."""
        self.seal_written()
        for fence, _ in self._waiting:
            fence.wait()
        self.seal_written()
        self._leaves = True

    def close(self) -> None:
        """End the connection: the holder frees what no seal names. Idempotent."""
        self._holder.close()

    def _seal(self, block: KeptBlock) -> None:
        group = self._memory.group_of(block.block)
        handles = self._memory.handles_of(group)
        seals = [] if group in self._parts else [*self._part_seals(group, handles)]
        places = [self._log.seal(each) for each in (*seals, _block_seal(block))]
        if None in places:
            for seal in [seal for seal, place in zip(seals, places, strict=False) if place is not None]:
                self._drop(seal.serial)
            if not self._is_full:
                log.warning(
                    "vmmkv: the log of the holder at %s is full: the next engine computes some blocks", self._holder.path
                )
            self._is_full = True
            return
        self._parts[group] = handles
        self._sealed[block.block] = block

    def _unmapped(self, group: int) -> None:
        """The handles of a group, whose blocks were all dropped, are about to go: what the log says of them is void."""
        self._parts.pop(group, None)

    def _part_seals(self, group: int, handles: Sequence[Handle]) -> Iterator[Sealed]:
        for run, handle in enumerate(handles):
            yield Sealed(self._serials[handle], None, 1, 0, run, group, 0, _PART, bytes(_WORD_BYTES))

    def _drop(self, serial: int) -> None:
        if not self._log.drop(serial):
            self._rewrite()  # without it

    def _rewrite(self) -> None:
        parts = [seal for group, handles in self._parts.items() for seal in self._part_seals(group, handles)]
        self._log.rewrite(self._identity, [*parts, *map(_block_seal, self._sealed.values())])


def _block_seal(block: KeptBlock) -> Sealed:
    words = len(block.hash) // _WORD_BYTES
    return Sealed(_FIRST_BLOCK + block.block, None, words, 0, 0, block.depth, 0, _BLOCK, block.hash)


def _read(contents: LogContents, held: dict[int, int], shape: Shape) -> tuple[dict[int, dict[int, int]], list[KeptBlock]]:
    """Serials of the handles of each whole group, by run; and the blocks in these, in the order in which they were sealed.

    A last group with fewer blocks is left out: an engine that may not map all its groups counts on whole ones.
    """
    parts: defaultdict[int, dict[int, int]] = defaultdict(dict)
    blocks: list[KeptBlock] = []
    for serial, place in contents.live.items():
        seal = contents.seals[place]
        if seal.namespace == _PART and seal.group < len(shape.part_bytes) and held.get(serial) == shape.part_bytes[seal.group]:
            parts[seal.page][seal.group] = serial
        elif seal.namespace == _BLOCK and 0 <= serial - _FIRST_BLOCK < shape.num_blocks:
            blocks.append(KeptBlock(serial - _FIRST_BLOCK, seal.tokens, seal.page))
    num_whole = shape.num_blocks // shape.group_blocks
    whole = {group: found for group, found in parts.items() if group < num_whole and len(found) == len(shape.part_bytes)}
    return whole, [block for block in blocks if block.block // shape.group_blocks in whole]
