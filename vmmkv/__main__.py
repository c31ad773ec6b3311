"""`python -m vmmkv`: the same as the `vmmkv` command, also from a checkout that is not installed."""

from vmmkv.cli.main import command

if __name__ == "__main__":
    command()
