"""Physical pages, the addresses that they stand under, and the slots that sequences run in.

slots          what occupies each slot: opened, filled, parked, taken over, evicted; read this first
pool           the extents of a budget, free or held, and what is evicted first
extents        size classes, extents, and the device as their source
address_space  arenas, the table of slots, what is mapped under each, and tensors over addresses
storage        what becomes of views that torch saves, pickles, copies or shares
mapper         growths and reclaims: mapping, and unmapping behind a fence
slot_memory    how far each slot may be written, and what the device knows of it
sharing        rows of one slot under another, by alias or by copy
states         passive data of slots, without torch
memory_map     what is mapped under a slot, to draw it
transaction    the lock around every operation
"""
