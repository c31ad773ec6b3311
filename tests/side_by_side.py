"""Work of child processes, side by side on all cores: for the scripts of this folder that start many, one after the other."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results of `work` for each item, as it ends. An error, or Ctrl-C, lets what has begun end, and begins nothing else."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
