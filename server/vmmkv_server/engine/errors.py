"""The error by which an engine ends."""


class EngineDied(Exception):
    """The device's context is lost, or another rank. Close the engine; after a lost context another one needs a new process."""
