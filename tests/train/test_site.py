"""Commands of the site's pages that need no cluster, with folders in place of stores."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from builders import pages
from builders.train import chats, families, node
from concertina_trainer.data.sample import transformed

LAW = "tests/unit/repository/test_site.py::test_commands_have_the_options_that_there_are"
LIMIT = 400
PLANS = pages.beginning_with("planning.md", pages.WITHOUT_CLUSTER["planning.md"])
pytestmark = pytest.mark.timeout(LIMIT)


def run(script: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_commands_about_data_run(tmp_path: Path) -> None:
    name = "data.md"
    Tokenizer(WordLevel({"document": 0, "<eos>": 1, "?": 2}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus").mkdir()
    lines = "".join(json.dumps({"text": f"document {number} " * 9}) + "\n" for number in range(600))
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress(lines.replace("document", "another").encode()))
    blocks = pages.beginning_with(name, pages.WITHOUT_CLUSTER[name])
    script = "".join(block.text for block in blocks).replace("s3://bucket", str(tmp_path))
    run(script, tmp_path)
    assert (tmp_path / "data" / "validation").is_dir()


def test_a_build_that_would_leave_data_out_prints_what_its_page_shows(tmp_path: Path) -> None:
    (block,) = pages.beginning_with("data.md", "$ concertina data build --out data corpus/")
    command, shown = block.text.removeprefix("$ ").split("\n", 1)
    (tmp_path / "corpus").mkdir()
    others = ("LICENSE", "README.md", "extra.csv", "a.jsonl", "b.jsonl")
    for name in (*others, *(f"{number}.jsonl.zst" for number in range(12))):
        (tmp_path / "corpus" / name).touch()
    program, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == os.EX_CONFIG, done.stderr
    assert (done.stdout + done.stderr).split() == shown.split()


def test_data_that_are_not_text_are_built_as_their_page_says(tmp_path: Path) -> None:
    name = "typed-data.md"
    [code] = [block.text for block in pages.blocks(pages.DOCS / name) if block.language == "python"]
    exec(code, made := {})
    sample = made["Sample"](np.zeros(9, np.int64), {"features": np.ones((9, 20), np.float16)}, 5)
    louder = transformed(made["louder"], sample, 0, 8).fields["features"]
    assert len({*louder.ravel().tolist()} - {1.0}) == 1
    [lines] = [block.text for block in pages.blocks(pages.DOCS / name) if block.language == "json"]
    (tmp_path / "clicks.jsonl").write_text(lines)
    (tmp_path / "examples").symlink_to(pages.ROOT / "examples")
    clicks, sessions, tracks, audio = (
        run(block.text.replace("s3://bucket", str(tmp_path)).replace("s3://demo", f"{tmp_path}/demo"), tmp_path)
        for block in pages.beginning_with(name, pages.WITHOUT_CLUSTER[name])
    )
    assert "elements of token uint16 below 1000, time int64 in 1 documents" in clicks
    assert "elements of token uint8 below 200, time int64 in " in sessions
    assert "elements of embedding float32x16 in " in tracks
    assert "elements of token uint8 below 8, features float16x20" in audio


def test_a_model_is_fine_tuned_as_its_page_says(parent, folder, tmp_path: Path) -> None:
    """Run the page on a tiny model, in larger steps and shorter sequences. It answers as the page's chats do."""
    name, length = "fine-tune.md", "320"
    families.made("qwen3", vocab_size=400, num_hidden_layers=2).save_pretrained(tmp_path / "qwen3")
    chats.tokenizer(tmp_path / "qwen3", chats.REASONING)
    [lines] = [block.text for block in pages.blocks(pages.DOCS / name) if block.language == "json"]
    (tmp_path / "chats.jsonl").write_text(lines)
    build, generate, export = (
        block.text.replace("s3://bucket", f"file://{tmp_path}").replace("2048", length)
        for block in pages.beginning_with(name, pages.WITHOUT_CLUSTER[name])
    )
    assert "4 chats" in run(build, tmp_path)

    [manifest] = [manifest for block in pages.blocks(pages.DOCS / name) for manifest in block.manifests]
    spec = json.loads(json.dumps(manifest["spec"]).replace("s3://bucket", f"file://{tmp_path}").replace("2048", length))
    faster = {"steps": 40, "globalBatchSize": 2, "optimizer": {"learningRate": 0.02, "warmupSteps": 4}}
    outcome = node.Job(folder, parent, {**spec["trainer"], **faster}, spec["checkpoint"]).run(spec["replicas"])
    assert set(outcome.codes.values()) == {0}, outcome.output

    first = json.loads(lines.splitlines()[0])["messages"]
    assert first[0]["content"] in generate
    assert run(f"CUDA_VISIBLE_DEVICES= {generate}", tmp_path) == f"<think>\n\n</think>\n\n{first[1]['content']}\n"
    assert "tokenizer.json from" in run(export, tmp_path)
    assert "<|im_start|>" in json.loads((tmp_path / "tuned-model/tokenizer_config.json").read_text())["chat_template"]
    (convert,) = pages.beginning_with("dcp.md", pages.WITHOUT_CLUSTER["dcp.md"])
    run(convert.text.replace("s3://bucket/run-1", spec["checkpoint"]["uri"]), tmp_path)
    assert (tmp_path / "FOLDER" / ".metadata").is_file()


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("block", PLANS, ids=[str(number) for number, _ in enumerate(PLANS)])
def test_commands_that_plan_run(block: pages.Block, tmp_path: Path) -> None:
    shutil.copy(pages.ROOT / "examples" / "demo.yaml", tmp_path / "job.yaml")
    assert "tokens" in run(block.text, tmp_path)


@pytest.mark.long(law=LAW)
def test_a_model_of_your_own_is_planned() -> None:
    (block,) = pages.beginning_with("own-models.md", pages.WITHOUT_CLUSTER["own-models.md"])
    assert "frames/s" in run(block.text, pages.ROOT)
