"""The suites: one module a question. Each has `run(recorder)`; bench/cli.py lists them and says what else they may have."""
