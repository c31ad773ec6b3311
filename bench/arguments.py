"""A command line whose refusals are one line on stderr, with status 2."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's, without the usage in front of an error: of dozens of options it would hide what was wrong."""

    def error(self, message: str) -> NoReturn:
        """What argparse itself refuses."""
        self.refuse(f"{message}; --help says what there is")

    def refuse(self, message: str) -> NoReturn:
        """End the process with what was wrong and what would work."""
        self.exit(2, f"{self.prog}: {message}\n")
