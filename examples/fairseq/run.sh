#!/usr/bin/env bash
# Python's documentation topics as a language model: preprocess, train, evaluate, generate, all with fairseq's tools.
#   examples/fairseq/run.sh [ATTENTION] [FOLDER]
#   examples/fairseq/run.sh "quest(init=12)"  # queries start at norm 12; the default, null, is the paper's
set -euo pipefail
attention="${1:-quest}"
out="$(mkdir -p "${2:-runs/fairseq}" && cd "${2:-runs/fairseq}" && pwd)"
quest="$(python -m quest_fairseq)"  # the folder of the plugin, with its configs

python - "$out" <<'PYTHON'
import sys
from pathlib import Path

from quest_suites.fairseq.corpus import BytePairs, pydocs

splits = dict(zip(("train", "valid", "test"), pydocs(), strict=True))
pairs = BytePairs(splits["train"], 500)
for name, lines in splits.items():
    Path(sys.argv[1], name).write_text("".join(f"{pairs.encode(line)}\n" for line in lines))
PYTHON

[ -d "$out/data-bin" ] || fairseq-preprocess --only-source --trainpref "$out/train" --validpref "$out/valid" \
    --testpref "$out/test" --destdir "$out/data-bin" --workers 1 >"$out/preprocess.log" 2>&1

# The same command goes on where it stopped; with another attention it is an error, so each has its own folder.
checkpoints="$out/${attention//[^a-z0-9]/-}"
quest run fairseq-hydra-train --config-dir "$quest/configs" --config-name pydocs hydra.run.dir=. \
    common.cpu=true common.log_format=simple task.data="$out/data-bin" \
    model.attention="'$attention'" checkpoint.save_dir="$checkpoints" 2>&1 | grep -E "quest_core|train_inner|valid on"

quest run fairseq-eval-lm "$out/data-bin" --cpu --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
    --sample-break-mode none --tokens-per-sample 128 --context-window 64 --batch-size 32 \
    --required-batch-size-multiple 1 --post-process "@@ " 2>&1 | grep Perplexity

echo "The return statement" | quest run fairseq-interactive "$out/data-bin" --cpu --task language_modeling \
    --path "$checkpoints/checkpoint_best.pt" --beam 4 --max-len-b 24 --post-process "@@ " 2>/dev/null | grep -E "^D-"
