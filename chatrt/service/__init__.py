"""Answers and conversations: what the server serves, made of the engine, the store and the wire."""

from chatrt.service.requests import ServiceSettings
from chatrt.service.service import ChatService

__all__ = ["ChatService", "ServiceSettings"]
