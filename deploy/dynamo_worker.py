"""A vmmkv engine as a worker of NVIDIA Dynamo, whose frontend tokenises, routes by KV events and answers OpenAI's API.

    pip install ai-dynamo==1.4.2
    export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=/tmp/dynamo
    python -m dynamo.frontend --router-mode kv --http-port 8000 &
    python deploy/dynamo_worker.py --model llama-3.1-8b --device cuda:0 --kv-events 'tcp://127.0.0.1:*' &
    python deploy/dynamo_worker.py --model llama-3.1-8b --device cuda:1 --kv-events 'tcp://127.0.0.1:*' &

Options are those of `vmmkv serve` for the engine, and Dynamo's `--namespace` and `--component`.
"""

import argparse
import asyncio
import dataclasses
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

import msgspec
from dynamo._core import Context
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from vmmkv_server import config as options
from vmmkv_server.engine_client import ENGINE_COMMAND, Answers, EngineClient, EngineDead, EngineProcess
from vmmkv_server.models import resolve
from vmmkv_server.protocol import BLOCK_TOKENS, Generate, Output, Ready
from vmmkv_server.sampling_params import SEED_MASK, InvalidParam, RequestRefused, SamplingParams

FORWARDED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "stop_token_ids", "ignore_eos",
)  # fmt: skip
"""Parameters of Dynamo that SamplingParams has by the same name. The frontend itself looks for stop strings."""


class VmmkvEngine(LLMEngine):
    """One engine process: tokens in, tokens out."""

    def __init__(self, config: options.EngineConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._directory = tempfile.TemporaryDirectory(prefix="vmmkv-")
        self._client = EngineClient(f"ipc://{self._directory.name}/engine")
        self._process: EngineProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._answers: dict[str, Answers] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """From the command line."""
        parser = argparse.ArgumentParser(description="a vmmkv engine as a worker of NVIDIA Dynamo")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="backend")
        for option in (each for each in options.OPTIONS if each.field in options.EngineConfig.__dataclass_fields__):
            is_switch = option.kind is bool
            form: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": option.kind}
            parser.add_argument(option.flag, dest=option.field, default=None, **({} if option.is_size else form))
        given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
        namespace, component = given.pop("namespace"), given.pop("component")
        config = options.make_config(given, {}, None).engine
        name = Path(config.model).name
        config = dataclasses.replace(config, model=str(resolve(config.model, weights=config.load_format != "dummy")))
        return cls(config, name), WorkerConfig(
            namespace=namespace,
            component=component,
            model_name=config.model,
            served_model_name=name,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
        )

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model. Raises: EngineShutdown with the reason."""
        as_json = msgspec.json.encode(self._config).decode()
        self._process = await EngineProcess.start(ENGINE_COMMAND, socket=self._client.address, config=as_json)
        self._client.start()
        self._watching = asyncio.create_task(self._watch(self._process))
        ready = await self._client.settled()
        if not isinstance(ready, Ready):
            raise EngineShutdown(self._client.cannot_start or "the engine has ended")
        return EngineConfig(
            model=self._config.model,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=ready.limits.max_tokens,
                kv_cache_block_size=BLOCK_TOKENS,
                total_kv_blocks=ready.num_blocks,
                max_num_seqs=ready.limits.max_sequences,
            ),
        )

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Where the engine publishes; none without `--kv-events`."""
        source = self._client.require_ready().kv_events
        return (
            [] if source is None else [ZmqSource(endpoint=source.endpoint.replace("0.0.0.0", "127.0.0.1"), topic=source.topic)]
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Raises: InvalidArgument for what this engine cannot do, EngineShutdown."""
        prompt = list(request["token_ids"])
        params = self._params(request, prompt)
        try:
            answers = self._client.submit([Generate(request_id=context.id(), prompt=prompt, params=params)])
            self._answers[context.id()] = answers
            with answers:
                async for news in answers:
                    for output in news:
                        assert isinstance(output, Output), "no beams and no log-probabilities of prompts are asked for"
                        chunk = GenerateChunk(token_ids=list(output.token_ids), index=0)
                        if output.finish_reason is not None:
                            cached = answers.cached.get(context.id(), {})
                            chunk["finish_reason"] = output.finish_reason
                            chunk["completion_usage"] = {
                                "prompt_tokens": len(prompt),
                                "completion_tokens": answers.num_tokens,
                                "total_tokens": len(prompt) + answers.num_tokens,
                                "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
                            }
                        yield chunk
        except EngineDead as error:
            raise EngineShutdown(str(error)) from error
        finally:
            self._answers.pop(context.id(), None)

    async def abort(self, context: Context) -> None:
        """The client is gone."""
        if (answers := self._answers.get(context.id())) is not None:
            answers.close()

    async def cleanup(self) -> None:
        """End the engine. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            await self._process.stop(self._client.shutdown if self._client.was_ready else None)
        await self._client.close()
        self._directory.cleanup()

    def _params(self, request: GenerateRequest, prompt: list[int]) -> SamplingParams:
        sampling, stops, outputs = (
            request.get(name) or {} for name in ("sampling_options", "stop_conditions", "output_options")
        )
        asked: dict[str, Any] = {**sampling, **stops}
        refused = [name for name in ("guided_decoding", "use_beam_search") if asked.get(name)]
        refused += [name for name in ("logprobs", "prompt_logprobs") if outputs.get(name) is not None]
        if refused or (asked.get("n") or 1) > 1:
            raise InvalidArgument(f"{(refused or ['n'])[0]} is not served behind Dynamo: leave it out")
        given = {name: asked[name] for name in FORWARDED if asked.get(name) is not None}
        given.setdefault("seed", secrets.randbits(63))
        limits = self._client.require_ready().limits
        try:
            tokens = limits.fit(len(prompt), asked.get("max_tokens"))
            params = SamplingParams(**given | {"seed": given["seed"] & SEED_MASK}, max_tokens=tokens)
            limits.check(prompt, params)
        except (InvalidParam, RequestRefused) as error:
            raise InvalidArgument(str(error)) from error
        return params

    async def _watch(self, process: EngineProcess) -> None:
        """When the engine has ended, leave: Dynamo then sends nothing here."""
        await self._client.engine_ended(f"The engine process ended with {await process.ended()}.")
        os.kill(os.getpid(), signal.SIGTERM)


async def main() -> None:
    """Serve until SIGTERM, or until the engine ends. Without uvloop, which Dynamo uses: it starts no process groups."""
    engine, config = await VmmkvEngine.from_args()
    await Worker(engine, config).run()


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # an interpreter that ends while Dynamo's threads run may be aborted
