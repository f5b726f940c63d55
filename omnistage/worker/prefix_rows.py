"""Rows of every position that stands in vLLM's KV cache, kept in CPU memory beside it.

A request that finds its prefix in the prefix cache does not compute it again; its rows are here.
They are addressed as the KV cache is, by block and slot, so that whatever vLLM may hit is here, and
nothing else is.

Why an entry carries no hash of its tokens. It would be another's only if a slot were computed, or a
block handed out, without the store's knowledge:

- vLLM hits whole blocks of committed tokens. Each of their slots was computed by a step since the
  block was handed out, and a step empties the slots that it computes before it stores: those of
  a rejected draft too, when they are computed again, also if that step stores nothing because its
  rows could not be taken.
- A step also empties the blocks that it hands out, so that a slot nobody has computed since, as
  in a block that was copied in part, is absent and not its last owner's. A block that a preempted,
  aborted or finished request leaves is only free: it is hit as it is, or handed out again.
- A block may be hit from the very step on in which its last slot is computed: rows of a step are
  stored before those of its hits are loaded.
- Steps are taken whole, in their order. A step of async scheduling whose rows are copied late is
  taken late, and so are those behind it.

Where vLLM hits what it has not computed, in its own KV cache as here, the store is refused: see
``cache_group.py``.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from omnistage.worker.block_tables import Span, StepBlocks


class AbsentRows(LookupError):
    """Rows that are not in the store.

    Args:
        key: Their key.
        positions: Their positions in the request, ascending.
    """

    def __init__(self, key: str, positions: Sequence[int]) -> None:
        super().__init__(f"no rows of {key!r} were stored for positions {_ranges(positions)}")
        self.key = key
        self.positions = positions


class PrefixRows:
    """Rows by key, KV cache block and slot.

    For every step, in the order of the steps: :meth:`begin`, then what it stores, then what it
    loads. One thread at a time.

    A key takes address space for a row in every slot of the KV cache, and memory for those that
    were ever stored, which stays.

    Args:
        blocks: Blocks of the KV cache.
        block_size: Tokens of a block.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._keys: dict[str, _Rows] = {}

    def begin(self, step: StepBlocks) -> None:
        """Forget what stood in the blocks that a step hands out, and in the slots it computes."""
        if not self._keys:
            return
        fresh = np.array(step.fresh, np.int64)
        computed = self._slots(list(step.computed.values()))
        for rows in self._keys.values():
            rows.stored.reshape(self._blocks, self._block_size)[fresh] = False
            rows.stored[computed] = False

    def store(self, key: str, spans: Sequence[Span], rows: NDArray[np.uint8]) -> None:
        """Keep rows that a step computed.

        Args:
            key: What they are rows of.
            spans: Their positions, as :class:`StepBlocks` has them; no slot twice.
            rows: [rows, bytes of a row], those of the spans behind one another; copied.

        Raises:
            ValueError: They are not as many as the positions, or not as wide as the key's first.
            OSError: There is no memory for the key's first rows.
        """
        slots = self._slots(spans)
        if rows.ndim != 2 or len(rows) != len(slots):
            raise ValueError(f"rows of {key!r}: shape {rows.shape} for {len(slots)} positions")
        kept = self._keys.get(key)
        if kept is None:
            kept = _Rows(self._blocks * self._block_size, rows.shape[1])
        if kept.data.shape[1] != rows.shape[1]:
            raise ValueError(
                f"rows of {key!r} have {rows.shape[1]} bytes, and had {kept.data.shape[1]}"
            )
        self._keys[key] = kept
        kept.data[slots] = rows
        kept.stored[slots] = True

    def load(self, key: str, span: Span) -> NDArray[np.uint8]:
        """Rows of a request's positions, [positions, bytes of a row], owning their memory.

        Raises:
            AbsentRows: Some of them are not here: no step has stored them.
        """
        kept = self._keys.get(key)
        if kept is None:
            raise AbsentRows(key, range(span.first, span.end))
        slots = self._slots([span])
        stored = kept.stored[slots]
        if not stored.all():
            raise AbsentRows(key, (np.flatnonzero(~stored) + span.first).tolist())
        return kept.data[slots]

    def _slots(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """The spans' slots in the whole KV cache, behind one another."""
        size = self._block_size
        firsts = np.array([span.first for span in spans], np.int64)
        counts = np.array([span.end - span.first for span in spans], np.int64)
        tables = np.array([len(span.blocks) for span in spans], np.int64)
        blocks = np.array([block for span in spans for block in span.blocks], np.int64)
        # Place in the span's own blocks, and then in those of all spans behind one another.
        rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = rows + np.repeat(firsts % size, counts)
        tables = np.repeat(np.cumsum(tables) - tables, counts)
        slots: NDArray[np.int64] = blocks[tables + places // size] * size + places % size
        return slots


class _Rows:
    """One key's rows in every slot, and which slots have one.

    Raises:
        ValueError: A row has no bytes.
        OSError: There is no memory for it.
    """

    def __init__(self, slots: int, width: int) -> None:
        # Pages are committed as they are written. Not in huge ones, as numpy asks for: blocks are
        # handed out from all over the cache, and a row would commit 2 MiB.
        memory = mmap.mmap(-1, slots * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.data = np.frombuffer(memory, np.uint8).reshape(slots, width)
        self.stored = np.zeros(slots, np.bool_)


def _ranges(positions: Sequence[int]) -> str:
    """Ascending positions as ``0-15, 32``."""
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    ends = zip([0, *cuts], [*cuts, len(positions)], strict=True)
    runs = [(positions[start], positions[end - 1]) for start, end in ends]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
