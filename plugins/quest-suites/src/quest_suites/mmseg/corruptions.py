"""Common corruptions of Hendrycks and Dietterich (ICLR 2019) for segmentation, as one more transform of a pipeline.

The protocol is that of Kamann and Rother (CVPR 2020), which SegFormer and later papers follow: 16 corruptions, noises
at severities 1 to 3 because stronger noise leaves little of an image, all others at 1 to 5. A corruption's result is
the mean over its severities.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.registry import TRANSFORMS

from quest_core.errors import PluginError
from quest_suites.corruptions import corrupt

CORRUPTIONS = (
    "motion_blur", "defocus_blur", "glass_blur", "gaussian_blur", "gaussian_noise", "impulse_noise", "shot_noise",
    "speckle_noise", "brightness", "contrast", "saturate", "jpeg_compression", "snow", "spatter", "fog", "frost",
)  # fmt: skip
"""The 16 of the protocol."""


def severities(name: str) -> range:
    """Return the severities of a corruption in the protocol."""
    return range(1, 4 if name.endswith("noise") else 6)


@TRANSFORMS.register_module()
class Corrupt(BaseTransform):
    """Corrupts an image after LoadImageFromFile.

    The random numbers depend only on the file's name, the corruption and its severity, so an image is the same in every
    run, for every model and number of workers.
    """

    def __init__(self, name: str, severity: int) -> None:
        try:
            import imagecorruptions  # noqa: F401
        except ImportError as error:
            raise PluginError(
                f"corruptions need imagecorruptions-imaug ({error}); pip install 'quest-suites[robustness]'"
            ) from error
        self.name, self.severity = name, severity

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Replace ``results['img']`` [height, width, 3], BGR and uint8."""
        key = f"0/{Path(results['img_path']).name}/{self.name}/{self.severity}"
        made = corrupt(results["img"][..., ::-1], self.name, self.severity, key)
        results["img"] = np.ascontiguousarray(made[..., ::-1])
        return results


def distort(pipeline: list[dict[str, Any]], name: str, severity: int) -> list[dict[str, Any]]:
    """Return a test pipeline, whose first step loads an image, with the corruption as its second."""
    load, *rest = copy.deepcopy(list(pipeline))
    return [load, {"type": "Corrupt", "name": name, "severity": severity}, *rest]
