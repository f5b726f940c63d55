"""Rows of cached prefixes: those of vLLM's real schedulers, bit for bit; the edges; the memory.

A runner without a model computes, for each position, a hash of all tokens up to it. It knows the
tokens as vLLM's runners do: from what a step says, and from what it has sampled.
"""

from __future__ import annotations

import random
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from omnistage.worker.block_tables import BlockTables, Span, StepBlocks
from omnistage.worker.prefix_rows import AbsentRows, PrefixRows
from tests.core.factories import BLOCK, Driver, make_request, make_scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

WIDTHS = {"hidden": 16, "codes": 3}
"""The keys, and the bytes of a row of each."""


@cache
def chained(before: bytes, token: int) -> bytes:
    """The row of a token behind those whose last row is given."""
    return blake2b(before + token.to_bytes(8, "little", signed=True), digest_size=16).digest()


def chain(tokens: list[int]) -> list[bytes]:
    """The row of each token."""
    rows = [b""]
    for token in tokens:
        rows.append(chained(rows[-1], token))
    return rows[1:]


def slots(span: Span) -> list[int]:
    """The plain way to the slots of a span."""
    skipped = span.first // BLOCK
    return [
        span.blocks[position // BLOCK - skipped] * BLOCK + position % BLOCK
        for position in range(span.first, span.end)
    ]


def packed(rows: list[bytes], width: int) -> Any:
    return np.frombuffer(b"".join(row[:width] for row in rows), np.uint8).reshape(-1, width)


class RowDriver(Driver):
    """Drives a scheduler with rows stored and loaded as a worker is to do it, each one checked.

    Args:
        scheduler: vLLM's own.
        failures: The share of steps whose rows cannot be taken.
        seed: Which steps these are.
        run_ahead: Steps in flight.
    """

    def __init__(
        self, scheduler: Any, *, failures: float = 0, seed: int = 0, run_ahead: int = 1
    ) -> None:
        # Of two families, so that the ids of some requests go together and then part.
        super().__init__(
            scheduler, run_ahead=run_ahead, samples=lambda name, i: 500 + i + len(name) % 2 * 1000
        )
        self.tables = BlockTables(BLOCK)
        self.rows = PrefixRows(scheduler.kv_cache_config.num_blocks, BLOCK)
        self.tokens: dict[str, list[int]] = {}
        """Each request's, which are those that its runner knows."""
        self.loaded = 0
        """Positions of cached prefixes whose rows came."""
        self.absent = 0
        """Positions of cached prefixes whose rows were not stored."""
        self.uncomputed: list[int] = []
        """Positions of cached prefixes that vLLM had not computed for these tokens."""
        self.same_step = 0
        """Prefixes that another request computed in the very step."""
        self._random = random.Random(seed)
        self._failures = failures
        self._computed: dict[int, bytes] = {}  # what was last computed in a slot
        self._stored: dict[str, dict[int, bytes]] = {key: {} for key in WIDTHS}

    def step(self) -> bool:
        busy = super().step()
        scheduled = self.last_scheduled
        if scheduled is not None and not scheduled.num_scheduled_tokens:
            # vLLM's workers get these steps too: they say who is over, or preempted.
            assert self.tables.update(scheduled) == ([], {}, {})
        return busy

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        output = super()._execute(scheduled)
        for new in scheduled.scheduled_new_reqs:
            # V2's runner is told all tokens, V1's those of the prompt.
            tokens = new.prefill_token_ids or new.prompt_token_ids
            assert tokens is not None
            self.tokens[new.req_id] = list(tokens)
        for request_id in scheduled.scheduled_cached_reqs.resumed_req_ids:
            self.tokens[request_id] = list(
                scheduled.scheduled_cached_reqs.all_token_ids[request_id]
            )
        step = self.tables.update(scheduled)
        self._compute(step, scheduled)
        for request_id, span in step.cached.items():
            self._check(request_id, span, step)
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.tokens[request_id] += sampled
        return output

    def _compute(self, step: StepBlocks, scheduled: SchedulerOutput) -> None:
        assert list(step.computed) == list(scheduled.num_scheduled_tokens)
        self.rows.begin(step)
        rows: dict[str, list[bytes]] = {}
        for request_id, span in step.computed.items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            rows[request_id] = chain(self.tokens[request_id] + drafts)[span.first : span.end]
            held = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            assert slots(Span(span.first, span.end, held[span.first // BLOCK :])) == slots(span)
            for slot, row in zip(slots(span), rows[request_id], strict=True):
                self._computed[slot] = row
                for stored in self._stored.values():
                    stored.pop(slot, None)
        for block in step.fresh:
            for slot in set(range(block * BLOCK, (block + 1) * BLOCK)):
                for stored in self._stored.values():
                    stored.pop(slot, None)
        if self._random.random() < self._failures:
            return
        for key, width in WIDTHS.items():
            # Not every request has every key's rows, and the order is the runner's own.
            stores = [i for i in step.computed if "mute" not in i and (key, i[0]) != ("codes", "s")]
            self._random.shuffle(stores)
            self.rows.store(
                key,
                [step.computed[i] for i in stores],
                packed([row for i in stores for row in rows[i]], width),
            )
            for i in stores:
                self._stored[key].update(zip(slots(step.computed[i]), rows[i], strict=True))

    def _check(self, request_id: str, span: Span, step: StepBlocks) -> None:
        """A cached prefix's rows are what its own tokens say, or said to be absent."""
        assert span.first == 0
        due = chain(self.tokens[request_id])[: span.end]
        held = [self._computed.get(slot) for slot in slots(span)]
        if held != due:  # and so is its KV cache
            self.uncomputed += [p for p in range(span.end) if held[p] != due[p]]
            return
        of_this_step = {slot for other in step.computed.values() for slot in slots(other)}
        self.same_step += bool(of_this_step.intersection(slots(span)))
        for key, width in WIDTHS.items():
            stored = [slot in self._stored[key] for slot in slots(span)]
            self.loaded += sum(stored)
            self.absent += span.end - sum(stored)
            if all(stored):
                assert (self.rows.load(key, span) == packed(due, width)).all()
                continue
            with pytest.raises(AbsentRows) as caught:
                self.rows.load(key, span)
            positions = list(caught.value.positions)
            assert positions == [p for p, there in enumerate(stored) if not there]
            for p in set(range(span.end)) - set(positions):
                one = Span(p, p + 1, [span.blocks[p // BLOCK]])
                assert self.rows.load(key, one).tobytes() == due[p][:width]


def make_driver(*, v2: bool = False, failures: float = 0, seed: int = 0, **fields: Any) -> Any:
    """vLLM's own scheduler with a prefix cache, and its driver."""
    run_ahead = fields.pop("run_ahead", 1)
    scheduler = make_scheduler(prefix_cache=True, stock=True, **fields)
    scheduler.use_v2_model_runner = v2
    return RowDriver(scheduler, failures=failures, seed=seed, run_ahead=run_ahead)


def add(driver: RowDriver, request_id: str, **fields: Any) -> None:
    driver.add(make_request(request_id, record=None, **fields))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 100), st.integers(1, 40), st.integers(0, 2)),
        st.tuples(st.just("mute"), st.integers(1, 100), st.integers(1, 40), st.integers(0, 2)),
        # Together more than the smaller pools hold, so that some are preempted.
        st.tuples(st.just("burst"), st.integers(20, 60), st.integers(20, 60), st.integers(2, 5)),
        st.tuples(st.just("session"), st.integers(1, 50), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("more"), st.integers(0, 40), st.integers(1, 20), st.integers(0, 1)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("reset"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 30), st.just(0), st.just(0)),
    ),
    min_size=6,
    max_size=30,
)


def prompt(length: int, family: int) -> list[int]:
    """Tokens that go together with another family's up to one block and a half."""
    return [100 + i + (family * 1000 if i >= BLOCK * 3 // 2 else 0) for i in range(length)]


SCHEDULES = given(
    operations=OPERATIONS,
    asynchronous=st.booleans(),
    run_ahead=st.integers(1, 3),
    blocks=st.sampled_from([10, 16, 16, 60]),
    budget=st.sampled_from([16, 48, 512]),
    drafts=st.sampled_from([0, 0, 3]),
    v2=st.booleans(),
    failures=st.sampled_from([0, 0, 0.1, 0.5]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=150, deadline=None)
@SCHEDULES
def test_every_cached_prefix_has_its_own_rows_or_none(**schedule: Any) -> None:
    every_prefix(**schedule)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=5000, deadline=None)
@SCHEDULES
def test_every_cached_prefix_in_thousands_of_schedules(**schedule: Any) -> None:
    every_prefix(**schedule)


def every_prefix(
    operations: list[tuple[str, int, int, int]],
    asynchronous: bool,
    run_ahead: int,
    blocks: int,
    budget: int,
    drafts: int,
    v2: bool,
    failures: float,
    seed: int,
) -> None:
    asynchronous = asynchronous and not drafts
    driver = make_driver(
        asynchronous=asynchronous,
        run_ahead=run_ahead if asynchronous else 1,
        blocks=blocks,
        budget=budget,
        drafts=drafts,
        v2=v2,
        failures=failures,
        seed=seed,
    )
    names: list[str] = []
    live = driver.scheduler.requests
    for kind, a, b, c in operations:
        if kind == "session" and drafts:
            continue  # vLLM's own KV cache would be wrong: see below
        if kind in {"add", "mute"}:
            names.append(f"r{len(names)}{'mute' * (kind == 'mute')}{'x' * (c % 2)}")
            add(driver, names[-1], prompt=prompt(a, c), max_tokens=b)
        elif kind == "burst":
            for i in range(c):
                names.append(f"r{len(names)}")
                add(driver, names[-1], prompt=prompt(a, i % 2), max_tokens=b)
        elif kind == "session":
            names.append(f"s{len(names)}")
            add(driver, names[-1], prompt=prompt(a, 0), max_tokens=b, resumable=True)
        elif kind == "more":
            sessions = [name for name in names if name[0] == "s" and name in live]
            if sessions:
                name = sessions[a % len(sessions)]
                add(driver, name, prompt=prompt(9, 1), max_tokens=b, resumable=bool(c))
        elif kind == "abort" and names:
            end(driver, names[a % len(names)])
        elif kind == "reset":
            # A session that waits for input keeps its blocks, and vLLM raises for that.
            sessions = [name for name in names if name[0] == "s" and name in live]
            driver.scheduler.reset_prefix_cache(reset_running_requests=bool(a) and not sessions)
        elif kind == "step":
            for _ in range(a):
                driver.step()
    for _ in range(60):
        if not driver.step():
            break
    for name in list(live):
        if name[0] == "s":
            end(driver, name)
    driver.run()
    driver.step()  # tells the worker what is over
    assert driver.uncomputed == []
    assert not len(driver.tables)


def end(driver: RowDriver, name: str) -> None:
    driver.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("asynchronous", [False, True])
class TestOnRealSchedulers:
    """What the random schedules are to meet, each for sure."""

    def test_a_prompt_that_was_computed_before(self, asynchronous: bool) -> None:
        driver = make_driver(asynchronous=asynchronous, run_ahead=1 + asynchronous)
        add(driver, "a", prompt=50, max_tokens=20)
        driver.run()
        add(driver, "b", prompt=70)
        driver.run()
        assert driver.loaded == 2 * 48, "three whole blocks, of both keys"

    def test_a_prompt_that_is_computed_in_the_same_step(self, asynchronous: bool) -> None:
        driver = make_driver(asynchronous=asynchronous, run_ahead=1 + asynchronous)
        add(driver, "a", prompt=50)
        add(driver, "b", prompt=50)
        driver.run()
        assert driver.same_step == 1
        assert driver.loaded == 2 * 48

    @pytest.mark.parametrize("v2", [False, True])
    def test_requests_that_were_preempted(self, v2: bool, asynchronous: bool) -> None:
        driver = make_driver(
            asynchronous=asynchronous, run_ahead=1 + asynchronous, blocks=10, v2=v2
        )
        for i in range(4):
            add(driver, f"r{i}", prompt=[i * 100 + k for k in range(30)], max_tokens=60)
        driver.run()
        assert driver.loaded
        assert not driver.absent

    def test_a_reset_of_the_prefix_cache_between_steps(self, asynchronous: bool) -> None:
        driver = make_driver(asynchronous=asynchronous, run_ahead=1 + asynchronous)
        add(driver, "a", prompt=50, max_tokens=20)
        for _ in range(5):
            driver.step()
        assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
        add(driver, "b", prompt=50)
        driver.run()
        assert driver.same_step == 1, "the first one's prompt, which is computed again"
        assert driver.loaded == 2 * 48

    def test_a_request_whose_rows_are_not_stored_leaves_them_absent(
        self, asynchronous: bool
    ) -> None:
        driver = make_driver(asynchronous=asynchronous, blocks=8)
        add(driver, "a", prompt=list(range(90)))
        driver.run()
        add(driver, "mute", prompt=50)  # in blocks that had the first one's rows
        driver.run()
        add(driver, "b", prompt=50)
        driver.run()
        assert not driver.loaded
        assert driver.absent == 2 * 48

    def test_what_a_key_lacks_another_may_have(self, asynchronous: bool) -> None:
        driver = make_driver(asynchronous=asynchronous)
        add(driver, "s", prompt=50)  # has no codes
        driver.run()
        add(driver, "b", prompt=50)
        driver.run()
        assert (driver.loaded, driver.absent) == (48, 48)


def test_rejected_drafts_leave_no_rows_where_a_step_stores_nothing() -> None:
    driver = make_driver(drafts=3, failures=0.5)
    add(driver, "a", prompt=20, max_tokens=60)
    driver.run()
    add(driver, "b", prompt=driver.tokens["a"][:70])
    driver.run()
    assert driver.loaded
    assert driver.absent


def test_with_speculation_vllm_takes_a_sessions_drafts_for_its_next_input() -> None:
    """Why it is refused; once vLLM mends it, this fails, and the refusal may go."""
    driver = make_driver(drafts=3)
    add(driver, "s", prompt=4, max_tokens=4, resumable=True)
    for _ in range(5):
        driver.step()
    add(driver, "s", prompt=[9] * 20, max_tokens=1, resumable=True)
    for _ in range(3):
        driver.step()
    add(driver, "b", prompt=[*driver.tokens["s"], 7])
    driver.step()
    # Drafts accepted behind the last id that the segment was to have count as computed, and the
    # input's first two ids, at their positions, are not computed.
    assert driver.uncomputed == [8, 9]


def test_under_the_priority_policy_vllm_hits_what_it_has_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why it is refused; once vLLM mends it, this fails, and the refusal may go."""
    driver = make_driver(blocks=13, policy="priority", budget=64)
    monkeypatch.setattr(driver.scheduler.scheduler_config, "long_prefill_token_threshold", 32)
    add(driver, "low", prompt=[1000 + i for i in range(160)], priority=5)
    driver.step()
    add(driver, "high", prompt=31, priority=0, max_tokens=5)
    driver.run()
    # Its last chunk was scheduled, of two blocks; then the other needed one more, and took it.
    assert driver.uncomputed == list(range(128, 144))


def rows_of(*values: int) -> Any:
    return np.array([[value, value + 1] for value in values], np.uint8)


def begun(fresh: list[int] | None = None, **computed: Span) -> StepBlocks:
    return StepBlocks(fresh or [], computed, {})


class TestStore:
    def test_rows_stand_in_their_blocks_and_slots(self) -> None:
        store = PrefixRows(8, 4)
        store.store("hidden", [Span(2, 7, [5, 1]), Span(9, 10, [3])], rows_of(1, 2, 3, 4, 5, 6))
        assert (store.load("hidden", Span(2, 7, [5, 1])) == rows_of(1, 2, 3, 4, 5)).all()
        assert (store.load("hidden", Span(3, 6, [5, 1])) == rows_of(2, 3, 4)).all()
        assert (store.load("hidden", Span(4, 7, [1])) == rows_of(3, 4, 5)).all()
        assert (store.load("hidden", Span(9, 10, [3])) == rows_of(6)).all()

    def test_what_is_loaded_is_a_copy(self) -> None:
        store = PrefixRows(2, 4)
        given = rows_of(1)
        store.store("hidden", [Span(0, 1, [1])], given)
        given[:] = 9
        rows = store.load("hidden", Span(0, 1, [1]))
        store.store("hidden", [Span(0, 1, [1])], rows_of(7))
        assert (rows == rows_of(1)).all()

    def test_absent_rows_are_named(self) -> None:
        store = PrefixRows(8, 4)
        store.store("hidden", [Span(1, 2, [5]), Span(5, 8, [2])], rows_of(1, 2, 3, 4))
        with pytest.raises(AbsentRows, match="'hidden' were stored for positions 0, 2-4, 8-9") as e:
            store.load("hidden", Span(0, 10, [5, 2, 6]))
        assert e.value.positions == [0, 2, 3, 4, 8, 9]

    def test_a_key_of_which_nothing_was_stored_is_absent(self) -> None:
        with pytest.raises(AbsentRows, match="'codes' were stored for positions 2-5"):
            PrefixRows(8, 4).load("codes", Span(2, 6, [1, 2]))

    def test_blocks_that_are_handed_out_are_empty_in_every_key(self) -> None:
        store = PrefixRows(8, 4)
        for key in ("hidden", "codes"):
            store.store(key, [Span(0, 8, [5, 2])], rows_of(*range(8)))
        store.begin(begun([2, 7]))
        for key in ("hidden", "codes"):
            assert len(store.load(key, Span(0, 4, [5]))) == 4
            with pytest.raises(AbsentRows):
                store.load(key, Span(4, 5, [2]))

    def test_slots_that_are_computed_again_are_empty_until_they_are_stored(self) -> None:
        """A rejected draft's row must not stay where the step behind it stores nothing."""
        store = PrefixRows(8, 4)
        store.store("hidden", [Span(4, 8, [2])], rows_of(*range(4)))
        store.begin(begun(a=Span(6, 8, [2])))
        assert (store.load("hidden", Span(4, 6, [2])) == rows_of(0, 1)).all()
        with pytest.raises(AbsentRows, match="6-7"):
            store.load("hidden", Span(4, 8, [2]))

    def test_nothing_is_stored_and_loaded_as_nothing(self) -> None:
        store = PrefixRows(8, 4)
        store.begin(begun())
        store.store("hidden", [], np.empty((0, 2), np.uint8))
        store.begin(begun())
        assert store.load("hidden", Span(0, 0, [])).shape == (0, 2)

    @pytest.mark.parametrize("shape", [(2, 2), (4, 2), (3,), (3, 2, 1)])
    def test_rows_that_are_not_as_many_as_their_positions_are_refused(
        self, shape: tuple[int, ...]
    ) -> None:
        with pytest.raises(ValueError, match="for 3 positions"):
            PrefixRows(8, 4).store("hidden", [Span(0, 3, [1])], np.zeros(shape, np.uint8))

    def test_rows_of_another_width_are_refused(self) -> None:
        store = PrefixRows(8, 4)
        store.store("hidden", [Span(0, 1, [1])], rows_of(1))
        with pytest.raises(ValueError, match="have 3 bytes, and had 2"):
            store.store("hidden", [Span(1, 2, [1])], np.zeros((1, 3), np.uint8))
        assert (store.load("hidden", Span(0, 1, [1])) == rows_of(1)).all()

    def test_memory_is_taken_for_the_rows_that_were_stored(self) -> None:
        process, width, size = psutil.Process(), 8192, 16
        store = PrefixRows(1 << 15, size)  # 4 GiB of rows
        blocks = [i * 300 for i in range(100)]  # all over the cache
        rows = np.ones((len(blocks) * size, width), np.uint8)  # 12.5 MiB
        before = process.memory_info().rss
        store.store("hidden", [Span(0, size, [block]) for block in blocks], rows)
        store.begin(StepBlocks(list(range(1 << 15)), {}, {}))
        taken = process.memory_info().rss - before
        assert rows.nbytes <= taken < rows.nbytes + (8 << 20)
        for _ in range(3):
            store.store("hidden", [Span(0, size, [block]) for block in blocks], rows)
        assert process.memory_info().rss - before < rows.nbytes + (8 << 20), "once a slot"
