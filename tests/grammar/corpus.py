"""The schemas that answers are tried on: those that are measured too, so that what is fast is what is valid."""

from bench.serve.schemas import SCHEMAS

__all__ = ["SCHEMAS"]
