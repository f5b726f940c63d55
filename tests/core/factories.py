"""vLLM's real scheduler without a model: tiny configuration, scripted samples, captured updates."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from omnistage.adapters.processor import wants_payload
from omnistage.core.collector import StepCollector
from omnistage.core.output_adapter import OutputAdapter
from omnistage.core.scheduler import OmniARAsyncScheduler, OmniARScheduler, OmniARSchedulerMixin
from omnistage.request import Start
from omnistage.wire import PROTOCOL_VERSION, Admission, Failed, Update, encode
from omnistage.worker.contract import HIDDEN, Occurrence
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE, Rows, StepPayload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

    from omnistage.adapters.processor import ChunkProcessor

CHANNEL = "audio"
SUBSCRIBER = "s"
BLOCK = 16
EOS = 1

_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


@cache
def _model_dir() -> str:
    directory = Path(mkdtemp(prefix="omnistage-tiny-"))
    (directory / "config.json").write_text(json.dumps(_TINY))
    return str(directory)


@cache
def _vllm_config(
    budget: int, max_seqs: int, prefix_cache: bool, blocks: int, drafts: int, policy: Any
) -> Any:
    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
    config = EngineArgs(
        model=_model_dir(),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=budget,
        max_num_seqs=max_seqs,
        enable_prefix_caching=prefix_cache,
        block_size=BLOCK,
        scheduling_policy=policy,
        speculative_config=speculation if drafts else None,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    return config


def make_scheduler(
    *,
    asynchronous: bool = False,
    budget: int = 512,
    max_seqs: int = 16,
    blocks: int = 1000,
    prefix_cache: bool = False,
    drafts: int = 0,
    policy: str = "fcfs",
    stock: bool = False,
) -> Any:
    """A scheduler of ours, or vLLM's own, with everything of vLLM's real."""
    config = _vllm_config(budget, max_seqs, prefix_cache, blocks, drafts, policy)
    config.scheduler_config.async_scheduling = asynchronous
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache_config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    ours = OmniARAsyncScheduler if asynchronous else OmniARScheduler
    theirs = AsyncScheduler if asynchronous else Scheduler
    return (theirs if stock else ours)(
        vllm_config=config,
        kv_cache_config=cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def make_request(
    request_id: str,
    *,
    prompt: int | Sequence[int] = 10,
    max_tokens: int = 5,
    final_stage: bool = False,
    consumers: tuple[tuple[str, str], ...] = ((CHANNEL, SUBSCRIBER),),
    record: bytes | str | None = "default",
    resumable: bool = False,
    final_only: bool = False,
    priority: int = 0,
    **sampling: Any,
) -> Request:
    """A request as vLLM's engine core makes it, with our admission record on it."""
    init_none_hash(sha256)
    if record == "default":
        record = encode(
            Admission(PROTOCOL_VERSION, request_id, 0, final_stage, consumers, Start(seed=7))
        )
    if final_only:
        sampling |= {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
    params = SamplingParams(
        max_tokens=max_tokens,
        extra_args=None if record is None else {"omnistage": record},
        **sampling,
    )
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(100, 100 + prompt))
        if isinstance(prompt, int)
        else list(prompt),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        resumable=resumable,
        priority=priority,
        arrival_time=0.0,
    )


def token(request_id: str, index: int) -> int:
    """The id that the scripted runner samples at a position: different for every request."""
    return 10 + (hash((request_id, index)) % 4000)


@dataclass
class Published:
    """What one topic has received, checked as it comes."""

    ids: dict[str, list[int]] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    rows: dict[str, list[int]] = field(default_factory=dict)
    others: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)
    """By request and key other than hidden states: the positions of each tensor's rows."""
    terminals: dict[str, list[Any]] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)

    def take(self, updates: Sequence[Update], buffers: Sequence[Any] = ()) -> None:
        names = [update.request_id for update in updates]
        assert len(set(names)) == len(names), "one update a request and message"
        for update in updates:
            seen = self.ids.get(update.request_id)
            assert (update.start is not None) == (seen is None), "start on the first update only"
            assert not self.terminals.get(update.request_id), "nothing follows a terminal"
            ids = self.ids.setdefault(update.request_id, [])
            segment_start = self.segments.get(update.request_id, 0)
            assert update.position == len(ids) - segment_start
            ids.extend(update.ids)
            for info in update.tensors:
                positions = np.frombuffer(buffers[info.frame], np.int64).reshape(info.shape)[:, 0]
                if info.name != HIDDEN:
                    named = list(range(info.first_row, info.first_row + info.shape[0]))
                    # With drafts the runner does not know which position will be the last.
                    assert info.name == "last" or positions.tolist() == named
                    self.others.setdefault((update.request_id, info.name), []).append(named)
                    continue
                rows = self.rows.setdefault(update.request_id, [])
                assert info.first_row == len(rows) == positions[0]
                rows.extend(positions.tolist())
            if update.segment_end:
                self.segments[update.request_id] = len(ids)
            if update.terminal is not None:
                self.terminals.setdefault(update.request_id, []).append(update.terminal)
            self.updates.append(update)


class Driver:
    """Drives a scheduler step by step with scripted samples, any number of steps in flight.

    Args:
        scheduler: The scheduler to drive, ours or vLLM's.
        run_ahead: Steps scheduled before the oldest one's output is taken.
        samples: Overrides :func:`token`.
    """

    def __init__(self, scheduler: Scheduler, *, run_ahead: int = 1, samples: Any = token) -> None:
        self.scheduler = scheduler
        self.rows_of: Callable[[str], bool] = lambda _: False
        """Whose rows the runner attaches; each is int64: its position and 0."""
        self.prompts_and_lasts = False
        """Whether it attaches ``prompt``, a prompt's rows, and ``last``, a row a request, too."""
        self.keys: Sequence[str] = (HIDDEN, "prompt", "last")
        """Which of these."""
        self.last_scheduled: SchedulerOutput | None = None
        self._run_ahead = run_ahead
        self._samples = samples
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def step(self) -> bool:
        """Schedule once, and take the oldest output if enough is in flight.

        Returns:
            Whether there is or was anything to do.
        """
        scheduled = self.last_scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            self._in_flight.append((scheduled, self._execute(scheduled)))
        idle = not scheduled.total_num_scheduled_tokens
        if self._in_flight and (len(self._in_flight) >= self._run_ahead or idle):
            self.update()
        return bool(self._in_flight) or not idle

    def update(self) -> None:
        """Take the oldest step's output."""
        scheduled, output = self._in_flight.popleft()
        self.updated(self.scheduler.update_from_output(scheduled, output))
        self._draft(scheduled)

    def updated(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """What a step's update returned."""

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.step() and not self.scheduler.has_unfinished_requests():
                return
        raise AssertionError("the scheduler does not come to an end")

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What a runner returns: ids for each request whose known tokens are all computed."""
        ids = list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            # schedule() has already counted this step in, drafts included.
            computed = request.num_computed_tokens - len(drafts)
            if computed < request.num_tokens:
                sampled.append([])
                continue
            index = computed - request.num_prompt_tokens
            accepted = drafts[: self._samples(request_id, index) % (len(drafts) + 1)]
            accepted = [i for i in accepted if i >= 0]  # vLLM pads drafts; a sampler rejects those
            sampled.append([*accepted, self._samples(request_id, index + len(accepted))])
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        self._attach(scheduled, output)
        return output

    def _attach(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The rows that a worker would have computed, on its output."""
        counts = {i: n for i, n in scheduled.num_scheduled_tokens.items() if self.rows_of(i)}
        if not counts:
            return
        firsts, data = [], []
        for request_id, count in counts.items():
            firsts.append(self.scheduler.requests[request_id].num_computed_tokens - count)
            rows = np.zeros((count, 2), np.int64)
            rows[:, 0] = range(firsts[-1], firsts[-1] + count)
            data.append(rows)
        keys = {HIDDEN: _packed(Occurrence.TOKEN, data)}
        if self.prompts_and_lasts:
            prompts = [self.scheduler.requests[name].num_prompt_tokens for name in counts]
            own = [rows[: max(p - f, 0)] for rows, p, f in zip(data, prompts, firsts, strict=True)]
            if any(map(len, own)):
                keys["prompt"] = _packed(Occurrence.PREFILL, own)
            keys["last"] = _packed(Occurrence.REQUEST, [rows[-1:] for rows in data])
        keys = {key: rows for key, rows in keys.items() if key in self.keys}
        places = [output.req_ids.index(request_id) for request_id in counts]
        payload = StepPayload(output.req_ids, places, firsts, list(counts.values()), keys)
        setattr(output, PAYLOAD_ATTRIBUTE, payload)

    def _draft(self, scheduled: SchedulerOutput) -> None:
        """Propose the next step's draft tokens, where the scheduler speculates."""
        count = self.scheduler.num_spec_tokens
        if not count:
            return
        ids = [i for i in scheduled.num_scheduled_tokens if i in self.scheduler.requests]
        drafts = [
            [
                self._samples(i, 7000 + self.scheduler.requests[i].num_tokens + k)
                for k in range(count)
            ]
            for i in ids
        ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))


def _packed(occurrence: Occurrence, rows: list[Any]) -> Rows:
    raw = np.concatenate(rows).reshape(-1).view(np.uint8)
    return Rows(occurrence, "int64", (2,), list(accumulate(map(len, rows))), raw)


class Harness(Driver):
    """A driver of one of our schedulers that captures what would be published.

    Args:
        scheduler: The scheduler to drive.
        channels: Processor of each channel.
        run_ahead: Steps scheduled before the oldest one's output is taken.
        limit: Steps that the hand-over queue holds.
        samples: Overrides :func:`token`.
        log_stats: Whether the engine is to keep statistics; without, outputs may be withheld.
    """

    scheduler: OmniARSchedulerMixin

    def __init__(
        self,
        scheduler: OmniARSchedulerMixin,
        channels: Mapping[str, ChunkProcessor],
        *,
        run_ahead: int = 1,
        limit: int = 1000,
        samples: Any = token,
        log_stats: bool = True,
    ) -> None:
        super().__init__(scheduler, run_ahead=run_ahead, samples=samples)
        takes = {name: p.requires_token_updates for name, p in channels.items()}
        rows = [name for name, p in channels.items() if wants_payload(p)]
        self.collector = StepCollector(takes, limit, log_stats=log_stats, takes_rows=rows)
        scheduler._omni_collector = self.collector
        self.adapter = OutputAdapter(channels, self.collector.steps)
        self.topics: dict[bytes, Published] = {}
        self.failed: list[Failed] = []
        self.returned: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, Any] = {}
        self.outputs_seen = 0
        self.messages_by_step: list[list[bytes]] = []

    def updated(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                self.outputs_seen += 1
                self.returned.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finish_reasons[output.request_id] = output.finish_reason
        self.publish()

    def publish(self) -> None:
        """Do the publisher thread's work."""
        topics = []
        for message in self.adapter.messages():
            topics.append(message.topic)
            self.topics.setdefault(message.topic, Published()).take(
                message.updates, message.buffers
            )
        self.messages_by_step.append(topics)
        self.failed += self.adapter.failures()

    @property
    def published(self) -> Published:
        """The default topic's updates."""
        return self.topics.get(f"{CHANNEL}/{SUBSCRIBER}\0".encode(), Published())
