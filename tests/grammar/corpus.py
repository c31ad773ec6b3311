"""The schemas that answers are tried on: those that the benchmarks measure, so that what is measured is what is proven valid."""

from bench.serve.schemas import SCHEMAS

__all__ = ["SCHEMAS"]
