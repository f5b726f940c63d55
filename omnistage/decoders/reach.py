"""Which frames a stack of convolutions reads for one frame's samples, worked out backwards.

Plain arithmetic on kernels and strides: a codec's context is known without its weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Steps ``first`` to ``last`` of a layer's input or output, both included.

    Start with a frame's samples, ``Span(0, hop_length - 1)``, and go from the last layer to the
    first. What is then left counts in frames: ``-first`` of them before the frame, ``last`` after.
    """

    first: int
    last: int

    def convolved(self, kernel: int, *, left: int, dilation: int = 1) -> Span:
        """The input of a convolution of stride 1 that makes this span.

        Args:
            kernel: Its length.
            left: Steps of padding in front of its input.
            dilation: Steps between its taps.
        """
        return Span(self.first - left, self.last - left + (kernel - 1) * dilation)

    def upsampled(self, stride: int, *, kernel: int | None = None, trim: int = 0) -> Span:
        """The input of a transposed convolution, or of a repetition, that makes this span.

        Args:
            stride: Steps that it makes of one.
            kernel: Its length; that of the stride, as in a repetition, if none is given.
            trim: Steps cut off at the front of its output.
        """
        kernel = stride if kernel is None else kernel
        first = self.first + trim - kernel + 1
        return Span(-(-first // stride), (self.last + trim) // stride)

    @property
    def left_context(self) -> int:
        """Frames before the frame."""
        return max(0, -self.first)

    @property
    def right_context(self) -> int:
        """Frames after the frame."""
        return max(0, self.last)
