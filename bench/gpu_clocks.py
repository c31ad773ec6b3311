"""How fast a GPU's clocks ran while a piece of a suite was measured, how warm it was and what it drew, as nvidia-smi says."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Final

import torch

from bench.rows import Row
from bench.timing import summarize

GPU: Final = "GPU"
"""The system of these rows."""

_EVERY_S: Final = 5
"""Apart: what a sample takes of the driver is not to be seen in what is measured."""

_ASKED: Final = {
    "clocks.sm": ("SM clock", "MHz"),
    "clocks.mem": ("memory clock", "MHz"),
    "power.draw": ("power", "W"),
    "temperature.gpu": ("temperature", "°C"),
}
"""By nvidia-smi's name, the metric and its unit."""


_STOP_S: Final = 30


@contextmanager
def watched(device: torch.device, suite: str, piece: str) -> Iterator[list[Row]]:
    """The list has its rows when the block has ended: percentiles over all of its time, what it prepares included.

    None on a CPU, where torch does not say which GPU it is, and where nvidia-smi is not there or says nothing.
    """
    rows: list[Row] = []
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    if uuid is None:
        yield rows
        return
    asked = [f"--id=GPU-{uuid}", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits", f"--loop={_EVERY_S}"]
    with TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(["nvidia-smi", *asked], stdout=said, stderr=subprocess.DEVNULL)
        except OSError:
            yield rows
            return
        try:
            yield rows
        finally:
            process.kill()
            process.wait(_STOP_S)
            said.seek(0)
            rows += _rows(suite, piece, said.read().splitlines())


def _rows(suite: str, piece: str, lines: Sequence[str]) -> Iterator[Row]:
    """Of lines of numbers, one for what is asked; what a GPU does not know is no number, and left out."""
    columns = zip(*(line.split(",") for line in lines if line.count(",") == len(_ASKED) - 1), strict=True)
    for (metric, unit), column in zip(_ASKED.values(), columns, strict=False):  # no lines, no columns
        samples = [float(each) for each in column if _is_number(each)]
        if samples:
            yield Row(suite=suite, workload=f"{piece}: GPU", system=GPU, metric=metric, unit=unit, summary=summarize(samples))


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()
