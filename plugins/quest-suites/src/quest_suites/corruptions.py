"""The common corruptions of Hendrycks and Dietterich (ICLR 2019), as imagecorruptions-imaug draws them."""

import random
import zlib

import numpy as np


def corrupt(image: np.ndarray, name: str, severity: int, key: str) -> np.ndarray:
    """Return a corrupted image, RGB and uint8 [height, width, 3]. Only `key` decides the random numbers."""
    from imagecorruptions import corrupt as drawn

    seed = zlib.crc32(key.encode())
    # The library draws from the global generators; two corruptions have generators of their own.
    own = {"seed": seed} if name in ("glass_blur", "impulse_noise") else {}
    before = np.random.get_state(), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        made: np.ndarray = drawn(np.ascontiguousarray(image), severity=severity, corruption_name=name, **own)
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])
    return made
