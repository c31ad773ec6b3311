"""The error by which an engine ends."""


class EngineDied(Exception):
    """The device's context is lost, or another rank, or an interrupt came within a step. Close the engine.

    After a lost context another one needs a new process.
    """
