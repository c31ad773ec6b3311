"""Benchmarks: what the driver's calls cost, what growing costs, what reading costs. `python -m bench` lists them."""
