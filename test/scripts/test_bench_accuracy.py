"""`bench_accuracy.py`: the choice of exports, reuse, and a whole run of this package's modes on a tiny model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import bench_accuracy
import demo_text
import pytest
from bench_accuracy import MODES, Subject, build_command, main, obtain_export, parse_arguments
from quantise_commands import Workload
from tiny_models import save_tiny_model

NEEDED = ["--model", "m", "--work_dir", "w"]
# What an export takes at the least: a safetensors file of any content in the folder that the command names.
FAKE_TOOL = "import sys; from pathlib import Path; p = Path(sys.argv[1]); p.mkdir(); (p / 'x.safetensors').touch()"


def test_exports_start_with_the_peer_and_take_options_from_the_table_or_the_command_line():
    words = [
        "--peer_python",
        "p",
        "--peer_args=--a",
        "--modes",
        "mse",
        "rtn",
        "--mode",
        "mine=--algorithm gptq --b 1",
    ]
    exports = parse_arguments([*NEEDED, *words]).exports
    assert list(exports.items()) == [
        ("peer", "--a"),
        ("mse", MODES["mse"]),
        ("rtn", MODES["rtn"]),
        ("mine", "--algorithm gptq --b 1"),
    ]
    assert "peer" not in parse_arguments(NEEDED).exports


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--modes", "rnt"], "'rnt' must be one of rtn"),
        (["--mode", "mine"], "must be NAME="),
        (["--mode", "peer=--x"], "must be NAME="),
        (["--mode", "a/b=--x"], "must be NAME="),
        (["--held_out_windows", "1"], r"\(1\) must be at least 2"),
        (["--peer_tuned_blocks", "2"], "needs --peer_python"),
        (["--model", "a/m", "b/m"], "must differ in their last part"),
    ],
)
def test_wrong_command_lines_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_arguments([*NEEDED, *words])
    assert message.replace("\\", "") in capsys.readouterr().err


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    dataset = tmp_path / "calibration.jsonl"
    dataset.write_text("one")
    work = Workload(model="m", nsamples=4, seqlen=8)
    return Subject(name="m", folder=tmp_path / "m", work=work, datasets=[dataset], windows={})


def test_commands_of_both_sides(subject: Subject):
    args = parse_arguments([*NEEDED, "--peer_python", "theirs", "--our_python", "ours", "--modes", "rtn"])
    shared = ["--model", "m", "--dataset", str(subject.datasets[0]), "--output_dir"]
    peer, ours = build_command(subject, "peer", 0, args), build_command(subject, "rtn", 0, args)
    assert peer[:7] == ["theirs", "-m", "auto_round", *shared[:4]]
    assert ours[:8] == ["ours", "-m", "autoround_fp8", *shared]
    assert "--scheme FP8_STATIC" in " ".join(peer)
    assert peer[-3:] == ["--iters", "0", "--disable_opt_rtn"]
    assert ours[-2:] == ["--algorithm", "rtn"]


def test_an_export_is_reused_only_if_asked_for_and_made_alike(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fake_command(subject: Subject, export: str, draw: int, args: argparse.Namespace) -> list[str]:
        folder = bench_accuracy.export_folder(subject, export, draw)
        return [sys.executable, "-c", FAKE_TOOL, str(folder), *args.exports[export].split()]

    monkeypatch.setattr(bench_accuracy, "build_command", fake_command)

    def is_reused(*words: str) -> bool:
        obtain_export(subject, "x", 0, parse_arguments([*NEEDED, *words]))
        return "reused" in capsys.readouterr().out

    assert not is_reused("--mode", "x=--a", "--reuse")  # nothing there yet
    assert is_reused("--mode", "x=--a", "--reuse")
    assert not is_reused("--mode", "x=--a")
    assert not is_reused("--mode", "x=--b", "--reuse")
    subject.datasets[0].write_text("two")
    assert not is_reused("--mode", "x=--b", "--reuse")
    (subject.folder / "draw-0" / "x" / "x.safetensors").unlink()
    (subject.folder / "draw-0" / "x").rmdir()
    assert not is_reused("--mode", "x=--b", "--reuse")


@pytest.mark.integration
def test_a_whole_run_without_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    # The characters of a tiny tokenizer's text come back with blanks between them, so half of a text is blanks.
    article = " ".join(f"Sentence {i} of some length." for i in range(60))
    monkeypatch.setattr(demo_text, "read_wikipedia", lambda _: [f"{i} {article}" for i in range(18)])
    monkeypatch.setattr(demo_text, "read_news", lambda _: [f"{i} {article[:100]}" for i in range(40)])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    model, work_dir = save_tiny_model(tmp_path / "tiny", "llama"), tmp_path / "work"
    sizes = [
        "--draws",
        "2",
        "--nsamples",
        "2",
        "--seqlen",
        "32",
        "--held_out_windows",
        "3",
        "--data_dir",
        str(tmp_path),
    ]
    words = ["--model", str(model), "--work_dir", str(work_dir), "--modes", "rtn", "gptq", *sizes]
    assert main(words) == 0
    found = json.loads((work_dir / "accuracy.json").read_text())["models"]["tiny"]
    assert found["texts"].keys() == {"wikipedia", "news"}
    for text in found["texts"].values():
        assert len(set(text["documents"])) == 3
        assert {export: [len(kls) for kls in draws] for export, draws in text["kls"].items()} == {
            "rtn": [3, 3],
            "gptq": [3, 3],
        }
        assert all(kl > 0 for draws in text["kls"].values() for kls in draws for kl in kls)
    assert [row["export"] for row in found["accuracy"]["news"]] == ["rtn", "gptq"]
    assert found["accuracy"]["news"][1]["verdict"] in ("pass", "FAIL")
    assert all(run["wall_s"] > 0 for runs in found["runs"].values() for run in runs)
    assert "| tiny | news | gptq: `--algorithm gptq` |" in capsys.readouterr().out
