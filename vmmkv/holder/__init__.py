"""A process that owns KV memory, so that what an engine computed outlives it: `vmmkv hold`.

    holder   handles, their file descriptors            ──SCM_RIGHTS──>   engine   imports, maps, computes, seals
             a log in shared memory: what is sealed     <──────mmap────            dies; the next one goes on

process      the holder: creates and frees handles, one engine at a time; read this first
client       an engine's connection to it
messages     what goes over it, and over those of elastic memory
source       a holder as the source of a pool's extents
log          the log of sealed extents, in memory that both map
sealed       the prefix tree's extents that the next engine takes from there; it follows the tree
arbiter      shares of one budget, of engines that map memory of their own: the policy, as plain data
sharing      an engine's connection for its share
control      the client of `vmmkv resize`
listening    sockets at a path, of one process at a time
borrowed     what another engine on this host has sealed, for the prefix tree

`Pool(device, budget_bytes, holder=PATH)` takes its extents from there; `PrefixCache` has `sealed` and `borrowed` made.
"""

from vmmkv.holder.client import HolderClient, check_there
from vmmkv.holder.log import Sealed, SealedLog

__all__ = ["HolderClient", "Sealed", "SealedLog", "check_there"]
