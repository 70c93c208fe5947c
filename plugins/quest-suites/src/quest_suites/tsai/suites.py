"""The suites of this plugin as data."""

from typing import Any

from quest_suites.declaring import choice, number, papers, timing_suite, whole

_FORECASTERS = (
    *("PatchTST", "iTransformer", "Transformer", "Crossformer", "MSGNet", "PAttn", "Pyraformer"),
    *("TemporalFusionTransformer", "TimeXer"),
)

SUITES: dict[str, dict[str, Any]] = {
    "ts/uea": {
        "summary": "UEA multivariate time-series classification with a 3-layer Transformer",
        "tasks": ["JapaneseVowels", "BasicMotions"],
        "metric": "accuracy",
        "unit": "%",
        "paper": papers(__file__)["ts/uea"],
        "tasks_from_data": "quest_suites.tsai.data:tasks",
        "data": "a folder with NAME_TRAIN.ts and NAME_TEST.ts (or .parquet); without one, two datasets of aeon",
        "options": [
            choice(
                "select",
                ("validation", "last", "paper"),
                "the reported epoch: best on a validation split, last, or the paper's best on the test split "
                "(optimistic)",
            ),
            whole("epochs", 100, "most epochs of a run"),
            whole("patience", 10, "epochs without a better accuracy before the run stops"),
            number("lr", 0.001, "constant learning rate of RAdam, the lowest if there are several"),
            whole("rates", 1, "learning rates, half a decade apart; validation chooses"),
            whole("batch_size", 16, "series a training step"),
            whole("d_model", 128, "features of a token"),
            whole("layers", 3, "encoder layers"),
            whole("heads", 8, "attention heads; they divide d_model"),
            number("dropout", 0.1, "dropout of the encoder"),
            choice(
                "architecture", ("paper", "TSTPlus"), "the Transformer of the paper's protocol, or tsai's own TSTPlus"
            ),
        ],
    },
    "forecast/ett": {
        "summary": "models of Time-Series-Library in its own trainer: 96 hours of ETTh1 or ETTh2 in, the next ones out",
        "tasks": ["ETTh1", "ETTh2"],
        "metric": "mse",
        "selection": "validation",
        "higher_is_better": False,
        "also": [{"metric": "mae"}],
        "tasks_from_data": "quest_suites.tsai.forecasting:tasks",
        "data": "the clones of https://github.com/thuml/Time-Series-Library and https://github.com/zhouhaoyi/ETDataset",
        "data_required": True,
        "options": [
            choice("model", _FORECASTERS, "a model of the library"),
            whole("horizon", 96, "hours to forecast, at most 720"),
            whole("epochs", 3, "most epochs; the library's early stopping may end before"),
            whole("width", 64, "features of a token; 512 in the library's scripts of PatchTST"),
            number("lr", 0.0001, "learning rate of Adam in the first epoch, which the library halves after each"),
        ],
    },
    "time/tsai": timing_suite(
        "an epoch of TSTPlus in tsai's own learner against tsai's own attention, in turns",
        ["residual-scores", "plain"],
        9,
    ),
}
