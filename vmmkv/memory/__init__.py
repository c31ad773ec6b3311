"""Physical pages, and the addresses that they stand under. Tokens and slots are known here, sequences are not.

pool           the extents of a budget, free or held, and what is evicted first; read this first
address_space  arenas, slots, what is mapped under each, and tensors over addresses
storage        what becomes of views that torch saves, pickles, copies or shares
mapper         growths and reclaims: mapping, and unmapping behind a fence
slot_memory    how far each slot may be written, and what the device knows of it
sharing        rows of one slot under another, by alias or by copy
states         passive data of slots, without torch
memory_map     what is mapped under a slot, to draw it
transaction    the lock around every operation
"""
