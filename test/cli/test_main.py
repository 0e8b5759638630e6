"""The command line as a whole: one-line errors, exit codes, recipes, and the options that users may rely on."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny_model

from autoround_fp8.checkpoint.writer import STAGING_DIR
from autoround_fp8.cli import evaluate, inspect, main, quantize
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.version import __version__


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """A test runner may be started with SIGHUP ignored (`nohup`), and what is ignored stays so."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def exit_of(*words: str) -> int:
    """The exit code, whether it is returned or raised."""
    try:
        return main.main(list(words))
    except SystemExit as e:
        return int(e.code or 0)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--nsampels", "--nsamples"),
        ("--ignore_layer", "--ignore_layers"),
        ("--output-dir", "--output_dir"),
        ("--batchsize=4", "--batch_size"),
    ],
)
@pytest.mark.parametrize("command", [[], ["quantize"]])
def test_a_mistyped_option_is_refused_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], command: list[str], word: str, near: str
) -> None:
    assert exit_of(*command, "some/model", word, "1") == 2
    error = one_line(capsys)
    assert f"unknown option {word.partition('=')[0]}" in error
    assert f"did you mean {near}?" in error


def test_an_option_like_nothing_is_refused_without_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("some/model", "--zzzqqq") == 2
    error = one_line(capsys)
    assert "--zzzqqq" in error
    assert "did you mean" not in error


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("some/model", "--nsamp", "3") == 2
    assert "unknown option --nsamp;" in one_line(capsys)


def test_mistyped_options_of_other_commands_get_their_own_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("compare", "a", "b", "--kernle", "cpu") == 2
    assert "did you mean --kernel?" in one_line(capsys)


@pytest.mark.parametrize("option", quantize.REFUSED_OPTIONS)
def test_an_option_that_means_nothing_here_says_why(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert exit_of("some/model", "--output_dir", "out", option) == 2
    error = one_line(capsys)
    assert f"{option} does not apply" in error
    assert quantize.REFUSED_OPTIONS[option] in error


@pytest.mark.parametrize(("option", "value"), [("--nsamples", "many"), ("--batch_size", "auto")])
def test_a_value_of_the_wrong_kind_is_named(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert exit_of("some/model", option, value) == 2
    error = one_line(capsys)
    assert option in error
    assert value in error


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("--version") == 0
    assert capsys.readouterr().out == f"autoround_fp8 {__version__}\n"
    assert exit_of("--help") == 0
    out = capsys.readouterr().out
    assert all(command in out for command in main.COMMANDS)


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert exit_of(command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: auto-round {command}")


def options_of(command: str) -> set[str]:
    actions = next(a for a in main.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {option for action in actions.choices[command]._actions for option in action.option_strings}


QUANTIZE_OPTIONS = """
    -h --help --model --model_name --model_name_or_path --device --device_map --devices --trust_remote_code
    --dataset --seqlen --seq_len --nsamples --nsample --batch_size --train_bs --bs --seed --calibration_dtype
    --low_gpu_mem_usage --output_dir --format --formats --max_shard_size --overwrite --scheme --bits --group_size
    --data_type --act_bits --act_group_size --act_data_type --disable_act_dynamic --layer_config --ignore_layers
    --fp_layers --iters --iter --keep_layers --target_kl --algorithm --enable_quanted_input --disable_quanted_input
    --tasks --task --include_path --eval_bs --limit --num_fewshot --debug --lr --minmax_lr
    --gradient_accumulate_steps --not_use_best_mse --enable_torch_compile --quant_lm_head --static_kv_dtype
    --act_headroom --moe_input_scale --unseen_experts --disable_range_probes
"""
EVAL_OPTIONS = """
    -h --help --tasks --task --include_path --limit --num_fewshot --eval_bs --batch_size --device --device_map --devices
    --kernel --dtype --trust_remote_code --output_path --debug
"""
COMPARE_OPTIONS = """
    -h --help --dataset --nsamples --nsample --seqlen --seq_len --seed --batch_size --bs --device --device_map --devices
    --dtype --kernel --trust_remote_code --json --per_block --debug
"""


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("quantize", QUANTIZE_OPTIONS),
        ("eval", EVAL_OPTIONS),
        ("compare", COMPARE_OPTIONS),
        ("inspect", "-h --help --json --debug"),
        (
            "convert",
            "-h --help --format --formats --output_dir --max_shard_size --overwrite --trust_remote_code --debug",
        ),
    ],
)
def test_options_are_a_promise(command: str, options: str) -> None:
    # Scripts of users depend on these names: add to the list, but take nothing away.
    assert options_of(command) == set(options.split())


def failing(error: BaseException) -> Any:
    def run(_args: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad a"), 2), (CheckpointError("bad b"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    monkeypatch.setattr(quantize, "run_quantize", failing(error))
    assert exit_of("some/model") == code
    assert (str(error) or "interrupted") in one_line(capsys)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "run_quantize", failing(CheckpointError("bad")))
    with pytest.raises(CheckpointError):
        main.main(["some/model", "--debug"])


def test_an_error_that_nobody_expected_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "run_quantize", failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main.main(["some/model"])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    calls: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        calls.append(args)
        return 0

    commands = (quantize.run_quantize, evaluate.run_eval, evaluate.run_compare, inspect.run_inspect)
    for command in commands:
        monkeypatch.setattr(f"{command.__module__}.{command.__name__}", run)
    return calls


@pytest.mark.parametrize("words", [["m"], ["quantize", "m"], ["--model", "m"], ["--nsamples", "128", "m"]])
def test_quantize_is_the_command_if_none_is_given(seen: list[argparse.Namespace], words: list[str]) -> None:
    assert main.main(words) == 0
    assert seen[0].command == "quantize"
    assert "m" in (seen[0].model, seen[0].model_word)


def test_other_commands_are_found(seen: list[argparse.Namespace]) -> None:
    main.main(["eval", "m", "--tasks", "piqa"])
    main.main(["compare", "a", "b"])
    main.main(["inspect", "a"])
    assert [args.command for args in seen] == ["eval", "compare", "inspect"]


def test_recipes_set_defaults_that_the_user_can_override(
    seen: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["x", "m"], ["x", "quantize", "m", "--nsamples", "7"]):
        monkeypatch.setattr(sys, "argv", words)
        for recipe in (main.main_best, main.main_light, main.main_rtn):
            recipe()
    assert [args.nsamples for args in seen] == [512, 32, 128, 7, 7, 7]
    assert [args.seqlen for args in seen[:3]] == [2048, 512, 2048]


def test_the_eval_recipe(seen: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "m", "--tasks", "piqa"])
    main.main_eval()
    assert (seen[0].command, seen[0].tasks) == ("eval", "piqa")


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from autoround_fp8.cli.main import main\n"
        "try:\n    main(['quantize', '--help'])\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autoround_fp8", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"autoround_fp8 {__version__}\n")


ENDINGS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_a_signal_ends_a_run_in_one_line_and_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Deep enough to work for many seconds after the staging folder is there.
    source = save_tiny_model(tmp_path / "source", "llama", num_hidden_layers=24)
    out = tmp_path / "deep" / "out"
    words = [str(source), "--output_dir", str(out), "--device", "cpu", "--nsamples", "512", "--seqlen", "128"]
    with subprocess.Popen(
        [sys.executable, "-m", "autoround_fp8", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            wait_for(out / STAGING_DIR, process)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, stdout) == (code, "")
    assert stderr.splitlines()[-1] == f"auto-round: interrupted by {number.name}"
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def raising(*numbers: signal.Signals) -> Any:
    """A command that sends itself signals, and cleans up before it ends."""

    def run(_args: Any) -> int:
        try:
            for number in numbers:
                signal.raise_signal(number)
        finally:
            for number in numbers:
                signal.raise_signal(number)
            print("cleaned up", file=sys.stderr)
        return 0

    return run


@pytest.fixture
def unchanged_signals() -> Iterator[None]:
    previous = [(number, signal.getsignal(number)) for number, _ in ENDINGS]
    yield
    for number, handler in previous:
        signal.signal(number, handler)


@pytest.mark.usefixtures("unchanged_signals")
@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_further_signals_do_not_break_off_the_cleanup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(quantize, "run_quantize", raising(number, signal.SIGHUP, signal.SIGTERM))
    assert exit_of("some/model") == code
    assert capsys.readouterr().err == f"cleaned up\nauto-round: interrupted by {number.name}\n"


@pytest.mark.usefixtures("unchanged_signals")
def test_a_terminal_that_is_gone_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def run(_args: Any) -> int:
        monkeypatch.setattr(sys, "stderr", Gone())
        signal.raise_signal(signal.SIGHUP)
        return 0

    monkeypatch.setattr(quantize, "run_quantize", run)
    assert exit_of("some/model") == 129


@pytest.mark.usefixtures("unchanged_signals")
def test_a_signal_that_a_library_swallowed_can_be_sent_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_args: Any) -> int:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(main, "REPEAT_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr(quantize, "run_quantize", run)
    assert exit_of("some/model") == 143
    assert "interrupted by SIGTERM" in one_line(capsys)


@pytest.mark.usefixtures("unchanged_signals")
@pytest.mark.parametrize("error", [None, CheckpointError("bad"), KeyboardInterrupt(), ZeroDivisionError()])
def test_signal_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    def own(*_: Any) -> None:
        raise AssertionError

    inside: list[Any] = []

    def run(_args: Any) -> int:
        inside.extend(signal.getsignal(number) for number, _ in ENDINGS)
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(quantize, "run_quantize", run)
    signal.signal(signal.SIGTERM, own)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        main.main(["some/model"])
    except ZeroDivisionError:
        assert isinstance(error, ZeroDivisionError)
    assert not {own, signal.SIG_DFL} & set(inside)
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("unchanged_signals")
def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    # As under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(quantize, "run_quantize", raising(signal.SIGHUP))
    assert exit_of("some/model") == 0


def test_outside_the_main_thread_signals_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Any] = []
    codes: list[int] = []

    def run(_args: Any) -> int:
        inside.extend(signal.getsignal(number) for number, _ in ENDINGS)
        return 0

    monkeypatch.setattr(quantize, "run_quantize", run)
    before = [signal.getsignal(number) for number, _ in ENDINGS]
    thread = threading.Thread(target=lambda: codes.append(main.main(["some/model"])))
    thread.start()
    thread.join()
    assert (codes, inside) == ([0], before)


def test_a_forked_worker_ends_by_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_args: Any) -> int:
        worker = os.fork()
        if worker == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(7)  # only if the signal did not end it
        return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])

    monkeypatch.setattr(quantize, "run_quantize", run)
    assert exit_of("some/model") == -signal.SIGTERM
