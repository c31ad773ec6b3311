"""The `vmmkv` command: one module for each of its commands, imported only when it is the one that runs."""


def printable(text: str) -> str:
    """Drop control characters, by which a model or a server could move the cursor."""
    return "".join(one for one in text if one.isprintable() or one in "\n\t")
