"""kn2row: a convolution as the sum of one matrix product for each tap of the kernel.

Source: Vasudevan, Anderson, Gregg 2017, arXiv 1704.04428; that taps leave out padding is this project's.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array


def conv2d(x: Array, kernel: Array, stride: int, pads: tuple[tuple[int, int], tuple[int, int]]) -> Array:
    """`conv.conv2d` with stride 1 and padding in pixels; products are added up in float32."""
    del stride
    sizes, taps = x.shape[1:3], kernel.shape[:2]
    outputs = [size + sum(pad) - k + 1 for size, k, pad in zip(sizes, taps, pads, strict=True)]
    total = jnp.zeros((x.shape[0], *outputs, kernel.shape[-1]), jnp.float32)
    for at in np.ndindex(taps):
        # where result i sees pixel i + shift of the image, and not padding
        shifts = [i - low for i, (low, _) in zip(at, pads, strict=True)]
        spans = [(max(0, -d), min(n, size - d)) for n, size, d in zip(outputs, sizes, shifts, strict=True)]
        if any(first >= end for first, end in spans):
            continue
        rows, columns = (slice(first + d, end + d) for (first, end), d in zip(spans, shifts, strict=True))
        product = jnp.matmul(x[:, rows, columns], kernel[at], preferred_element_type=jnp.float32)
        around = [(first, n - end) for (first, end), n in zip(spans, outputs, strict=True)]
        total += jnp.pad(product, ((0, 0), *around, (0, 0)))
    return total.astype(x.dtype)
