"""Doubles and contracts for those who write stages, processors, adapters and decoders.

A scripted AR stage publishes any ids at any time through the real output adapter, publisher and
sockets, without vLLM; a fake decoder writes indices into samples, from which they can be read back;
the contracts are lists of checks that an implementation must pass::

    @pytest.mark.parametrize("check", omnistage.testing.DECODER_CONTRACT)
    def test_my_decoder(check):
        check(MyDecoder)

A check takes what makes the thing, returns nothing, and raises AssertionError with a sentence, also
where the thing itself raised; that is its cause. It needs no test framework, and no running event
loop.
"""

from omnistage.testing.decoders import DECODER_CONTRACT
from omnistage.testing.doubles import FakeDecoder
from omnistage.testing.input_adapters import INPUT_ADAPTER_CONTRACT
from omnistage.testing.processors import PROCESSOR_CONTRACT, processor_contract
from omnistage.testing.scripted import Script, ScriptedARStage, scripted
from omnistage.testing.stages import AUDIO_STAGE_CONTRACT, STAGE_CONTRACT

__all__ = [
    "AUDIO_STAGE_CONTRACT",
    "DECODER_CONTRACT",
    "INPUT_ADAPTER_CONTRACT",
    "PROCESSOR_CONTRACT",
    "STAGE_CONTRACT",
    "FakeDecoder",
    "Script",
    "ScriptedARStage",
    "processor_contract",
    "scripted",
]
