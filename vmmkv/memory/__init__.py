"""Physical pages and the addresses that they stand under. Read `pool` first, then `address_space` and `slot_memory`."""
