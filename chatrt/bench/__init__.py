"""Measurements: of the bookkeeping alone, and of whole sessions through a server."""
