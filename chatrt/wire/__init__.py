"""The wire protocol without I/O: JSON frames in, typed messages out; answers in, events out.

Knows: the messages of docs/protocol. Does not know: sockets, asyncio, models, torch.
"""
