"""The gradients of ResNet-50 (He et al., 2015): what data parallelism reduces in every step."""

from __future__ import annotations

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of blocks; a block's last convolution is four times as wide."""

NUM_CLASSES = 1000


def gradient_shapes() -> list[tuple[int, ...]]:
    """The shapes of all 161 gradients, in the order of the layers.

    >>> import math
    >>> shapes = gradient_shapes()
    >>> len(shapes), sum(math.prod(shape) for shape in shapes)
    (161, 25557032)
    """
    shapes = _convolution(7, 3, 64)
    channels = 64
    for width, num_blocks in STAGES:
        for block in range(num_blocks):
            shapes += _convolution(1, channels, width)
            shapes += _convolution(3, width, width)
            shapes += _convolution(1, width, 4 * width)
            if block == 0:  # the short cut has to change its width too
                shapes += _convolution(1, channels, 4 * width)
            channels = 4 * width
    return [*shapes, (NUM_CLASSES, channels), (NUM_CLASSES,)]


def _convolution(size: int, channels_in: int, channels_out: int) -> list[tuple[int, ...]]:
    """Weights, and the scale and shift of the normalization after them."""
    return [(channels_out, channels_in, size, size), (channels_out,), (channels_out,)]
