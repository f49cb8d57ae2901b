"""The engine: synchronous steps over all running turns."""

from chatrt.engine.admission import EngineLimits
from chatrt.engine.engine import Engine
from chatrt.engine.forward import Target

__all__ = ["Engine", "EngineLimits", "Target"]
