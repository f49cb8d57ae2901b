"""The engine: synchronous steps over all running turns."""

from chatrt.engine.admission import EngineLimits
from chatrt.engine.engine import Engine, Target

__all__ = ["Engine", "EngineLimits", "Target"]
