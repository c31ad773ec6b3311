"""The `vmmkv` command: one module for each of its commands, imported only when it is the one that runs."""
