"""omnistage: the autoregressive stage runtime for speech and omni models, on stock vLLM.

Importing this package costs neither vllm nor torch; both load when a stage that needs them starts.
"""

from __future__ import annotations

__version__ = "0.1.0"
