"""chatrt: an interactive chat runtime built for low latency."""

__version__ = "0.1.0"
