"""Environment and fixtures of the whole suite: one thread a process, nothing from the network."""

from __future__ import annotations

import os

# Before anything imports torch or vllm: two cores are shared by several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
