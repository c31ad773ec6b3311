"""The http room."""
