"""Trainer's own TensorBoard shows the curves of WatchCallback, in a real browser.

With QUEST_WRITE_PICTURE=1 the test writes docs/figures/tensorboard.png.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from quest_transformers.watching import WatchCallback

pytest.importorskip("accelerate")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
program = pytest.importorskip("tensorboard.program", reason="tensorboard is not installed: pip install tensorboard")
PICTURE = Path(__file__).parents[3] / "docs" / "figures" / "tensorboard.png"


@pytest.fixture
def page():
    installed = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        path = playwright.chromium.executable_path if Path(playwright.chromium.executable_path).is_file() else installed
        if path is None:
            pytest.skip("no browser: playwright install chromium, or apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser.new_page(viewport={"width": 1000, "height": 480})
        browser.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_tensorboard_shows_the_curves(tmp_path, page, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, num_hidden_layers=2, max_position_embeddings=16, **sizes))
    data = [{"input_ids": ids, "labels": ids.flip(0)} for ids in torch.randint(0, 11, (64, 12))]
    options = {"max_steps": 200, "logging_steps": 5, "learning_rate": 0.03, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(
        str(tmp_path), report_to=["tensorboard"], use_cpu=True, disable_tqdm=True, save_strategy="no", **options
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[WatchCallback(every=5)])
    trainer.train()
    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(tmp_path / "log"), "--port", "0", "--load_fast", "false"])
    page.goto(f"{board.launch()}?tagFilter=attention/(max_logit|entropy)$&smoothing=0#timeseries", wait_until="commit")
    charts = page.locator("card-view canvas")
    charts.first.wait_for(timeout=240_000)
    page.get_by_role("button", name="Settings").last.click()  # closes its pane, so that two cards are side by side
    charts.nth(1).wait_for(timeout=60_000)
    page.wait_for_timeout(3_000)  # the lines are drawn after their axes
    assert page.locator("card-view", has_text="attention/max_logit").count() == 1
    picture = page.screenshot(type="png")
    assert len(picture) < 100_000
    if os.environ.get("QUEST_WRITE_PICTURE"):
        PICTURE.write_bytes(picture)
