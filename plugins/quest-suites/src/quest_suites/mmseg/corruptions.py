"""Common corruptions of Hendrycks and Dietterich (ICLR 2019) for segmentation, as one more transform of a pipeline.

The protocol is that of Kamann and Rother (CVPR 2020), which SegFormer and later papers follow: 16 corruptions, noises
at severities 1 to 3 because stronger noise leaves little of an image, all others at 1 to 5. A corruption's result is
the mean over its severities.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS

from quest_core.errors import ConfigError, PluginError, one_of
from quest_suites.corruptions import corrupt

CORRUPTIONS = (
    "motion_blur", "defocus_blur", "glass_blur", "gaussian_blur", "gaussian_noise", "impulse_noise", "shot_noise",
    "speckle_noise", "brightness", "contrast", "saturate", "jpeg_compression", "snow", "spatter", "fog", "frost",
)  # fmt: skip
"""The 16 of the protocol."""
HIGHEST = 5
NOISE_HIGHEST = 3


def severities(name: str) -> range:
    """Return the severities of a corruption in the protocol."""
    return range(1, (NOISE_HIGHEST if name.endswith("noise") else HIGHEST) + 1)


@TRANSFORMS.register_module()
class Corrupt(BaseTransform):
    """Corrupts an image: put ``dict(type='Corrupt', name='fog', severity=3)`` after LoadImageFromFile.

    The random numbers depend only on `seed`, the file's name, the corruption and its severity, so an image is the same
    in every run, for every model and number of workers.

    Args:
        name: one of the 16 corruptions of the protocol.
        severity: 1 to 5, 1 to 3 for the noises.
        seed: selects the random numbers.
    """

    def __init__(self, name: str, severity: int, seed: int = 0) -> None:
        try:
            import imagecorruptions  # noqa: F401
        except ImportError as error:
            raise PluginError(
                f"corruptions need imagecorruptions-imaug ({error}); pip install 'quest-suites[robustness]'"
            ) from error
        if name not in CORRUPTIONS:
            raise ConfigError(f"corruption is '{name}'; {one_of(name, CORRUPTIONS)}")
        if severity not in severities(name):
            raise ConfigError(f"severity of '{name}' is {severity!r}; it is 1 to {severities(name)[-1]}")
        self.name, self.severity, self.seed = name, severity, seed

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Replace ``results['img']`` [height, width, 3], BGR and uint8."""
        image = results["img"]
        if image.dtype != np.uint8 or image.ndim != 3 or min(image.shape[:2]) < 32:
            raise ConfigError(
                f"Corrupt was given {results.get('img_path')} as {image.dtype} {image.shape}; it takes uint8 images of "
                "at least 32x32, so put it right after LoadImageFromFile"
            )
        key = f"{self.seed}/{Path(results['img_path']).name}/{self.name}/{self.severity}"
        made = corrupt(image[..., ::-1], self.name, self.severity, key)
        results["img"] = np.ascontiguousarray(made[..., ::-1])
        return results

    def __repr__(self) -> str:
        return f"Corrupt(name={self.name!r}, severity={self.severity}, seed={self.seed})"


def corrupted(pipeline: list[dict[str, Any]], name: str, severity: int) -> list[dict[str, Any]]:
    """Return a test pipeline with the corruption inserted after the image is loaded.

    Raises:
        ConfigError: the pipeline has no LoadImageFromFile.
    """
    made = copy.deepcopy(list(pipeline))
    for index, step in enumerate(made):
        if str(step["type"]).endswith("LoadImageFromFile"):
            made.insert(index + 1, {"type": "Corrupt", "name": name, "severity": severity})
            return made
    raise ConfigError("the test pipeline has no LoadImageFromFile to insert the corruption after; add one")
