"""Answers and conversations: what the server serves, made of the engine, the store and the wire."""

from chatrt.service.service import ChatService, ServiceSettings

__all__ = ["ChatService", "ServiceSettings"]
