"""Two turns with OpenAI's SDK (`pip install openai websockets`), and what was cached of each."""

import os
from pathlib import Path

from openai import OpenAI

URL = os.environ.get("CHATRT_URL", "ws://127.0.0.1:8642/v1")
KEY_FILE = os.environ.get("CHATRT_API_KEY_FILE", "~/.local/state/chatrt/api-key")

KEY = Path(KEY_FILE).expanduser().read_text().strip()
client = OpenAI(api_key=KEY, base_url=URL.replace("ws", "http", 1))
previous = {}
with client.responses.connect() as connection:
    for question in ("What is the capital of France?", "And what is the capital of Italy?"):
        connection.response.create(input=question, temperature=0, **previous)
        for event in connection:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "error":
                raise SystemExit(event.error.message)
            elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                break
        details = event.response.usage.input_tokens_details
        ttft_ms = event.response.chatrt["ttft_ms"]
        print(f"\n({details.cached_tokens} tokens cached, first word after {ttft_ms:.0f} ms)")
        previous = {"previous_response_id": event.response.id}
