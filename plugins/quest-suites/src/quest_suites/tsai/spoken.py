"""Free Spoken Digits as series for ts/uea: python -m quest_suites.tsai.spoken recordings FOLDER.

github.com/Jakobovski/free-spoken-digit-dataset has 3,000 recordings, 50 of each digit by each of six speakers, at 8
kHz. Those numbered 0 to 4 are its official test. A series has 32 bands of 125 Hz: the log of the mean power in windows
of 32 ms, every 16 ms. What comes after the first second, which 20 recordings have, is cut off.
"""

import argparse
import re
import wave
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

HERTZ, SECONDS = 8000, 1
WINDOW, HOP, BANDS = 256, 128, 32
QUIET = 1e-6
"""Power that is added to that of recordings between −1 and 1, so that silence has a log."""
TESTED = range(5)


def bands(recording: Tensor) -> Tensor:
    """Return the log power of a recording [samples], between −1 and 1: [bands, windows]."""
    start = recording[: SECONDS * HERTZ]
    spectrum = torch.stft(start, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    power = spectrum[1:].abs().square() / WINDOW  # without the constant part
    return (power.unflatten(0, (BANDS, -1)).mean(1) + QUIET).log()


def read(path: Path) -> Tensor:
    """Return the samples of a file, between −1 and 1."""
    with wave.open(str(path)) as file:
        found = file.getframerate(), file.getsampwidth(), file.getnchannels()
        data = bytearray(file.readframes(file.getnframes()))
    if found != (HERTZ, 2, 1):
        raise ValueError(f"expected {HERTZ} Hz, 2 bytes per sample and 1 channel; found {', '.join(map(str, found))}")
    return torch.frombuffer(data, dtype=torch.int16) / 2**15


def main(argv: Sequence[str] | None = None) -> None:
    """Write SpokenDigits_TRAIN.parquet and SpokenDigits_TEST.parquet."""
    parser = argparse.ArgumentParser(prog="python -m quest_suites.tsai.spoken", description=__doc__)
    parser.add_argument("recordings", type=Path, help="the folder recordings of a clone")
    parser.add_argument("folder", type=Path, help="where the two files go: --data of ts/uea/SpokenDigits")
    given = parser.parse_args(argv)
    rows: dict[str, list[dict[str, object]]] = {"TRAIN": [], "TEST": []}
    for path in sorted(given.recordings.glob("*.wav")):
        if (name := re.fullmatch(r"(\d)_[a-z]+_(\d+)", path.stem)) is None:
            parser.error(f"{path} is not named like 7_jackson_32.wav")
        split = "TEST" if int(name[2]) in TESTED else "TRAIN"
        try:
            recording = read(path)
        except (ValueError, wave.Error) as error:
            parser.error(f"{path} cannot be read as a recording: {error}")
        series = {f"band{i}": row for i, row in enumerate(bands(recording).tolist())}
        rows[split].append({"label": name[1], **series})
    if not all(rows.values()):
        parser.error(
            f"{given.recordings} has {len(rows['TRAIN'])} recordings to train and {len(rows['TEST'])} to test; "
            "fix: git clone --depth 1 https://github.com/Jakobovski/free-spoken-digit-dataset, and name its recordings"
        )
    given.folder.mkdir(parents=True, exist_ok=True)
    for split, own in rows.items():
        path = given.folder / f"SpokenDigits_{split}.parquet"
        pd.DataFrame(own).to_parquet(path)
        print(f"wrote {path}: {len(own)} series")


if __name__ == "__main__":
    main()
