"""The server: WebSocket connections and bodyless HTTP. It moves frames and nothing else.

Knows: sockets, lanes, back-pressure, keys. Does not know: models, tokens, torch.
"""
