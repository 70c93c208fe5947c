"""Language modelling, clean and under the word-swap attack, trained and evaluated by fairseq's own tools.

A cell preprocesses text with fairseq-preprocess's function, trains with fairseq-train's on a shipped yaml, and
evaluates the best checkpoint with fairseq-eval-lm's, on the test text and on copies with a share of the words swapped.
The same words are swapped for every attention and seed.
"""

import json
import logging
import math
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

import quest_fairseq
from quest_core.checkpoints import ENTRY
from quest_suites.contract import Cell, Progress, Result, load_state, save_state

from .corpus import JOINT, BytePairs, Lines, pydocs, swap_words

CONFIGS = Path(quest_fairseq.__file__).parent / "configs"
RATES = {f"perplexity with {percent} % swapped": percent / 100 for percent in (1.5, 2.5, 5)}
"""Metric -> share of the test's words that are swapped."""

NO_PARAMETERS = ("version", "_float_tensor", "output_projection.weight", ENTRY)
"""Ends of keys of a state dict that add no parameter; shared embeddings have two keys."""
MERGES = 500
"""Byte-pair merges of lm/pydocs."""
SMOKE_UPDATES = 4
SMOKE_LINES = {"train": 200, "valid": 20, "test": 20}
SMOKE_LAYERS = 1


def run_wikitext103(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate one of the paper's models on WikiText-103.

    Returns:
        Metrics ``perplexity`` (on the test text), ``validation perplexity`` and those of RATES; series
        ``train_loss`` and ``valid_loss`` in bits a token.
    """
    assert cell.data is not None  # the harness has checked it
    folder = cell.data

    def lines(split: str) -> Lines:
        with (folder / f"wiki.{split}.tokens").open(encoding="utf-8") as file:
            # The window slides by one token, so every token takes one forward pass.
            return [line.strip() for line in islice(file, SMOKE_LINES[split] // 10 if cell.smoke else None)]

    ready = folder / "data-bin"
    data_bin = cell.workdir / "data-bin"
    test = lines("test")
    if (ready / "dict.txt").is_file() and not cell.smoke:
        data_bin = ready
    else:
        preprocess(data_bin, {"train": lines("train"), "valid": lines("valid"), "test": test})
    tokens = int(configuration(f"wikitext103-{cell.task}").task.tokens_per_sample)
    # The paper scores the last position of a window that slides by one token.
    return _train_and_evaluate(cell, progress, f"wikitext103-{cell.task}", data_bin, test, tokens - 1)


def run_pydocs(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate a small model on Python's documentation topics, in byte pairs.

    Perplexities are per word or end of a line: the scores of a word's pieces are added. fairseq counts a word that a
    window cuts as two, which divides the logarithm of each perplexity by one number, for all attentions alike. The text
    is that of the Python that runs the cell; ``details`` holds its number of words.

    Returns:
        As `run_wikitext103`, with losses per piece.
    """
    train, valid, test = pydocs()
    if cell.smoke:
        train, valid, test = train[: SMOKE_LINES["train"]], valid[: SMOKE_LINES["valid"]], test[: SMOKE_LINES["test"]]
    pairs = BytePairs(train, MERGES)
    splits = {"train": train, "valid": valid, "test": test}
    data_bin = cell.workdir / "data-bin"
    preprocess(data_bin, {name: list(map(pairs.encode, lines)) for name, lines in splits.items()})
    context = int(configuration("pydocs").task.tokens_per_sample) // 2
    result = _train_and_evaluate(cell, progress, "pydocs", data_bin, test, context, pairs.encode)
    result.details["words"] = {name: sum(len(line.split()) for line in lines) for name, lines in splits.items()}
    return result


def _train_and_evaluate(
    cell: Cell,
    progress: Progress,
    config: str,
    data_bin: Path,
    test: Sequence[str],
    context: int,
    encode: Callable[[str], str] | None = None,
) -> Result:
    """Train `config` on `data_bin`; evaluate the best checkpoint there and on attacked copies of `test`."""
    cfg = configuration(config)
    cfg.task.data = str(data_bin)
    cfg.model.attention = cell.attention
    cfg.common.seed = cell.seed
    cfg.common.cpu = not torch.cuda.is_available()
    cfg.checkpoint.save_dir = str(cell.workdir / "checkpoints")
    if cell.options["updates"] is not None:
        cfg.optimization.max_update = cell.options["updates"]
    if cell.smoke:
        cfg.optimization.max_update, cfg.common.log_interval, cfg.dataset.batch_size = SMOKE_UPDATES, 1, 2
        cfg.model.decoder_layers = SMOKE_LAYERS
    if cfg.lr_scheduler._name == "cosine":
        cfg.lr_scheduler.warmup_updates = min(cfg.lr_scheduler.warmup_updates, cfg.optimization.max_update // 4)

    places = {"perplexity": (data_bin, "test"), "validation perplexity": (data_bin, "valid")}
    for metric, rate in RATES.items():
        lines, attacked = swap_words(test, rate), cell.workdir / f"attacked-{rate}"
        preprocess(attacked, {"test": list(map(encode, lines)) if encode else lines}, dictionary=data_bin / "dict.txt")
        places[metric] = (attacked, "test")

    state = load_state(cell)
    if state is None:  # fairseq's own checkpoint, once it is trained, would be trained for one update more
        with watching(cfg.optimization.max_update, progress) as series:
            train(cfg)
        save_state(cell, state := {"series": series})

    checkpoint = cell.workdir / "checkpoints" / "checkpoint_best.pt"
    progress(0.95, "evaluating")
    given = ["--tokens-per-sample", str(cfg.task.tokens_per_sample), "--context-window", str(context)]
    given += ["--post-process", f"{JOINT} "] if encode else []
    given += ["--cpu"] if cfg.common.cpu else []
    metrics = {metric: perplexity(checkpoint, *place, given) for metric, place in places.items()}
    trained = torch.load(checkpoint, map_location="cpu", weights_only=False)
    return Result(
        metrics=metrics,
        series=state["series"],
        details={
            "parameters": sum(x.numel() for name, x in trained["model"].items() if not name.endswith(NO_PARAMETERS)),
            "updates": trained["optimizer_history"][-1]["num_updates"],
            "window": {"tokens": int(cfg.task.tokens_per_sample), "context": context},
        },
    )


# --- fairseq's tools, called as functions ---------------------------------------------------------------------------


def configuration(name: str) -> DictConfig:
    """Return a shipped yaml merged over fairseq's defaults, for `train`."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.initialize import add_defaults

    quest_fairseq.FairseqAdapter().install()
    cfg = OmegaConf.merge(OmegaConf.structured(FairseqConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert isinstance(cfg, DictConfig)
    add_defaults(cfg)
    return cfg


def train(cfg: DictConfig) -> None:
    """Train as fairseq-hydra-train does, in this process and on one device."""
    from fairseq import checkpoint_utils
    from fairseq_cli.train import main

    # fairseq keeps the best loss of an earlier training in this process there and would not save this run's best.
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    if not isinstance(cfg.model, Namespace):
        cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
        OmegaConf.set_struct(cfg, True)
    with open_dict(cfg.distributed_training):
        cfg.distributed_training.distributed_world_size = 1
    main(cfg)


def parse(tool: str, given: Sequence[str]) -> DictConfig:
    """Return the command line of a tool of fairseq as its function reads it; `tool` is training, eval_lm, ..."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    quest_fairseq.FairseqAdapter().install()
    parser = getattr(options, f"get_{tool}_parser")()
    with warnings.catch_warnings():  # hydra warns about the way fairseq calls it
        warnings.simplefilter("ignore", UserWarning)
        return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=list(given)))


def preprocess(
    folder: Path, splits: dict[str, Lines], dictionary: Path | None = None, pair: tuple[str, str] | None = None
) -> None:
    """fairseq-preprocess: write "train", "valid" and "test", or some of them, in binary form to `folder`.

    The dictionary is that of "train", or a given one. With a `pair` of languages each split has two texts, "train.en"
    and "train.de", and both share the dictionary.
    """
    from fairseq import options
    from fairseq_cli.preprocess import main

    shutil.rmtree(folder, ignore_errors=True)  # fairseq refuses to overwrite what a stopped cell left
    texts = folder.with_name(f"{folder.name}-text")
    texts.mkdir(parents=True, exist_ok=True)
    for name, lines in splits.items():
        (texts / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    given = ["--joined-dictionary", "--source-lang", pair[0], "--target-lang", pair[1]] if pair else ["--only-source"]
    given += ["--destdir", str(folder), "--workers", "1"]
    given += ["--srcdict", str(dictionary)] if dictionary else []
    for split in dict.fromkeys(name.partition(".")[0] for name in splits):
        given += [f"--{split}pref", str(texts / split)]
    main(options.get_preprocessing_parser().parse_args(given))


def perplexity(checkpoint: Path, data: Path, subset: str, given: Sequence[str]) -> float:
    """fairseq-eval-lm with `given` words: exp of the mean loss per word.

    With --post-process, it counts a word that begins in one window and ends in the next as two.
    """
    from fairseq_cli.eval_lm import main

    # With the default multiple of 8, fairseq drops the last batch if it is not full.
    fixed = """--sample-break-mode none --num-workers 0 --batch-size 32 --required-batch-size-multiple 1
        --no-progress-bar --log-format none"""
    words = [str(data), "--path", str(checkpoint), "--gen-subset", subset, *fixed.split(), *given]
    return float(main(parse("eval_lm", words))["perplexity"])


@contextmanager
def watching(updates: int, progress: Progress) -> Iterator[dict[str, list[float]]]:
    """Yield the losses that fairseq logs as JSON inside the block, in bits per token; report them to `progress`."""
    series: dict[str, list[float]] = {"train_loss": [], "valid_loss": []}

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "valid":
                series["valid_loss"].append(float(json.loads(record.getMessage())["valid_loss"]))
            elif record.name == "train_inner":
                logged = json.loads(record.getMessage())
                loss, done = float(logged["loss"]), int(logged["num_updates"])
                series["train_loss"].append(loss)
                if math.isfinite(loss):
                    progress(0.9 * done / updates, f"update {done} loss {loss:.3f}")

    logger, handler = logging.getLogger("fairseq.logging.progress_bar"), Watch()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield series
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
