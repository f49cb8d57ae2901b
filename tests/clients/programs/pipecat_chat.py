"""Pipecat's Responses service in a pipeline, told by lines of JSON what to do (see program.py).

Argument: base URL. The key is in OPENAI_API_KEY, where the package looks for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    LLMFullResponseEndFrame,
    LLMMessagesAppendFrame,
    LLMMessagesUpdateFrame,
    LLMTextFrame,
    LLMUpdateSettingsFrame,
    MetricsFrame,
)
from pipecat.metrics.metrics import LLMUsageMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService
from pipecat.workers.runner import WorkerRunner

MODEL = "smollm2-135m-instruct"
Settings = OpenAIResponsesLLMService.Settings


class Listener(FrameProcessor):
    """Hears what the service says, and interrupts it at its first words when `stop` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = False
        self.turns: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._said: dict[str, Any] = {"text": ""}

    def failed(self, sentence: str) -> None:
        """The service tells of an error, which does not come down the pipeline."""
        self._said["error"] = sentence

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Note what is in the frame and pass it on."""
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMTextFrame):
            self._said["text"] += frame.text
            if self.stop:
                self.stop = False
                await self.broadcast_interruption()
        elif isinstance(frame, MetricsFrame):
            for data in frame.data:
                if isinstance(data, LLMUsageMetricsData):
                    self._said |= usage(data)
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.turns.put_nowait(self._said)
            self._said = {"text": ""}
        await self.push_frame(frame, direction)


def usage(data: LLMUsageMetricsData) -> dict[str, int]:
    """Pipecat's names for the API's figures."""
    return {
        "input_tokens": data.value.prompt_tokens,
        "cached_tokens": data.value.cache_read_input_tokens or 0,
        "total_tokens": data.value.total_tokens,
    }


def frames(asked: dict[str, Any]) -> list[Frame]:
    """A person's turn: how it is to be answered, and its words, the first ones or further ones."""
    settings = Settings(
        model=asked.get("model", MODEL),
        max_completion_tokens=asked["max_tokens"],
        extra={"chatrt": asked.get("options", {})},  # a delta: left out, the last one stays
    )
    messages = [{"role": "user", "content": asked["say"]}]
    words = LLMMessagesAppendFrame if "previous" in asked else LLMMessagesUpdateFrame
    return [LLMUpdateSettingsFrame(delta=settings), words(messages=messages, run_llm=True)]


async def main() -> None:
    """Answer the lines of standard input until it ends."""
    service = OpenAIResponsesLLMService(
        ws_url=sys.argv[1].replace("http", "ws", 1) + "/responses",
        settings=Settings(model=MODEL, temperature=0),
    )
    listener = Listener()
    pair = LLMContextAggregatorPair(LLMContext())
    worker = PipelineWorker(
        Pipeline([pair.user(), service, listener, pair.assistant()]),
        params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
    )

    @service.event_handler("on_error")
    async def on_error(_: object, frame: ErrorFrame) -> None:
        listener.failed(frame.error)

    async def converse() -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            listener.stop = asked.get("stop", False)
            await worker.queue_frames(frames(asked))
            print(json.dumps(await listener.turns.get()))
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), converse())


asyncio.run(main())
