"""`dataset.py`: from what users pass to samples; the faults of calibration data by their numbers."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PAD, VOCAB_SIZE, tiny_tokenizer
from torch.utils.data import DataLoader, TensorDataset

from autoround_fp8.calibration.dataset import CalibrationData, load_calibration_data, make_batches
from autoround_fp8.errors import ConfigError, DataError

WORDS = "abcdefghij"


def load(dataset: Any, tokenizer: Any = "tiny", **options: Any) -> CalibrationData:
    options = {"nsamples": 8, "seqlen": 16, "seed": 42, **options}
    return load_calibration_data(dataset, tiny_tokenizer() if tokenizer == "tiny" else tokenizer, **options)


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a1_short_lines_are_packed_and_shortage_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "short.txt"
    path.write_text("\n".join(["ab cd ef gh ij"] * 20))
    data = load(str(path), seqlen=512)
    num_tokens = 20 * 15  # 14 characters and BOS
    assert data.num_tokens == num_tokens
    (warning,) = warnings(caplog)
    assert f"1 samples with {num_tokens} tokens, of 8 samples with up to 4096 tokens" in warning
    caplog.clear()
    assert [len(sample) for sample in load(str(path), seqlen=32).samples] == [32] * 8
    assert warnings(caplog) == []


def test_a2_bad_records_are_counted_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"text": "good line"}\n\n{"text": ""}\n{"text": null}\n{"text": "  "}\n')
    data = load(str(path), nsamples=1, seqlen=8)
    assert len(data.samples) == 1
    (warning,) = warnings(caplog)
    assert "mixed.jsonl: skipped 4 of 5 records" in warning


@pytest.mark.parametrize(
    ("content", "message"),
    [('\n{"text": ""}\n{"text": null}\n', "all of its 3 records are blank"), ("", "0 bytes")],
)
def test_a2_only_bad_or_empty_file_is_an_error_with_its_name(tmp_path: Path, content: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"bad\.jsonl.*{message}"):
        load(str(path))


@pytest.mark.parametrize("dataset", [[], [""], torch.empty(0, 4, dtype=torch.int64), {"text": []}, iter([])])
def test_no_data_at_all_is_an_error(dataset: Any):
    with pytest.raises(DataError, match="gives no calibration sample"):
        load(dataset)


def test_a4_all_known_shapes_give_the_same_sample_count(tmp_path: Path):
    chats = [[{"role": "user", "content": f"{w}?"}, {"role": "assistant", "content": f"{w}!"}] for w in ("ab", "cd")]
    texts = ["user : ab? assistant : ab!", "user : cd? assistant : cd!"]
    share_gpt = [
        [{"from": "human", "value": c[0]["content"]}, {"from": "gpt", "value": c[1]["content"]}] for c in chats
    ]
    shapes = [
        [{"text": text} for text in texts],
        [{"messages": chat} for chat in chats],
        [{"conversations": chat} for chat in share_gpt],
        [{"prompt": chat[0]["content"], "response": chat[1]["content"]} for chat in chats],
    ]
    names = [written(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate(shapes)]
    (tmp_path / "list.json").write_text(json.dumps(texts))
    (tmp_path / "columns.json").write_text(json.dumps({"text": texts}))
    (tmp_path / "objects.json").write_text(json.dumps(shapes[1]))
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    names += [str(tmp_path / name) for name in ("list.json", "columns.json", "objects.json", "lines.txt")]
    datasets = [*names, texts, shapes[1], chats]
    assert [len(load(dataset, seqlen=64).samples) for dataset in datasets] == [2] * len(datasets)
    chat_hashes = {load(dataset, seqlen=64).sha256 for dataset in (*names[1:4], shapes[1], chats)}
    assert len(chat_hashes) == 1


def test_a4_unknown_column_lists_found_and_accepted(tmp_path: Path):
    with pytest.raises(DataError, match=r"x\.jsonl has the columns foo; accepted are .*text, prompt"):
        load(written(tmp_path / "x.jsonl", [{"foo": "bar"}]))


def test_a5_chats_work_without_template_and_with_one_that_refuses(caplog: pytest.LogCaptureFixture):
    chats = [[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]]
    assert load(chats, tiny_tokenizer(chat_template=None), nsamples=1, seqlen=8).num_tokens == 8
    assert "no chat template" in caplog.text
    refusing = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert load(chats, tiny_tokenizer(refusing), nsamples=1, seqlen=8).num_tokens == len("be\n\nhi")
    with pytest.raises(DataError, match=r"the chat template refused 1 conversations \(TemplateError: never\)"):
        load(chats, tiny_tokenizer("{{ raise_exception('never') }}"))


def test_a5_some_refused_conversations_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture):
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    chats = [[{"role": "user", "content": content}] for content in ("bad", "good")]
    data = load(chats, tiny_tokenizer(template), nsamples=2)
    assert len(data.samples) == 1
    assert any("refused 1 conversations" in warning for warning in warnings(caplog))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a7_padding_of_the_user_never_reaches_a_sample(side: str):
    rows = [list(range(10, 22)), list(range(30, 37))]
    padding = [[PAD] * (12 - len(row)) for row in rows]
    ids = [(p + row) if side == "left" else (row + p) for p, row in zip(padding, rows, strict=True)]
    mask = [[int(token != PAD) for token in row] for row in ids]
    expected = load(rows, None)
    padded = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    loader = DataLoader([{key: value[i] for key, value in padded.items()} for i in range(2)], batch_size=2)
    for dataset in (padded, loader):
        data = load(dataset, None)
        assert data.sha256 == expected.sha256
        assert all(PAD not in sample for sample in data.samples)
    assert sorted(tuple(batch.shape) for batch in make_batches(expected.samples, 2)) == [(1, 7), (1, 12)]


def test_a8_no_pad_token_and_no_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    data = load(["abc", "abcdefg"], tokenizer, nsamples=2)
    assert sorted(map(len, data.samples)) == [4, 8]
    assert tokenizer.pad_token is None
    assert load([torch.tensor([5, 6, 7])], None).samples[0].tolist() == [5, 6, 7]
    with pytest.raises(ConfigError, match="tokenizer is needed"):
        load(["abc"], None)


def test_a10_seqlen_is_obeyed_for_text_and_tokens(caplog: pytest.LogCaptureFixture):
    texts = [WORDS * 10] * 4
    data = load(texts, nsamples=4)
    assert [len(sample) for sample in data.samples] == [16] * 4
    tokens = torch.tensor(tiny_tokenizer()(texts)["input_ids"])
    assert load(tokens, None, nsamples=4).sha256 == data.sha256
    clipped = load(texts, nsamples=4, seqlen=2048, max_positions=32)
    assert {len(sample) for sample in clipped.samples} == {32}
    assert warnings(caplog) == ["seqlen (2048) is reduced to the model's maximum position count (32)"]


def test_a11_one_very_long_line_is_cut_to_windows(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    path = tmp_path / "long.txt"
    path.write_text(WORDS * 5000)
    data = load(str(path), nsamples=8, seqlen=2048)
    assert [len(sample) for sample in data.samples] == [2048] * 8
    assert len(torch.stack(data.samples).unique(dim=0)) > 1  # windows of different places
    assert "at most seqlen (2048) tokens" in caplog.text
    assert warnings(caplog) == []


def test_a13_mixed_data_sets_give_their_shares_in_a_fixed_order(tmp_path: Path):
    a = written(tmp_path / "a.jsonl", [{"text": "a" * 20}, {"text": "b" * 20}])
    b = written(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": c * 20}], "n": 1} for c in "cd"])
    data = load(f"{a},{b}", nsamples=4)
    assert data.sha256 == load(f"{a},{b}", nsamples=4).sha256
    assert len(data.samples) == 4
    letters = "".join(sorted({tiny_tokenizer().decode(sample[-1]) for sample in data.samples}))
    assert letters == "abcd"
    assert [source.partition(":")[0] for source in data.sources] == [a, b]
    assert all("2 samples, 32 tokens, from 2 of 2 records" in source for source in data.sources)


def test_a13_num_shares_override_nsamples(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    a = written(tmp_path / "a.jsonl", [{"text": "a" * 20}] * 5)
    data = load(f"{a}:num=3,{a}:num=2", nsamples=128)
    assert len(data.samples) == 5
    assert warnings(caplog) == ["The num= options ask for 5 samples; they override nsamples (128)"]


def test_a13_one_empty_data_set_among_others_is_an_error(tmp_path: Path):
    a = written(tmp_path / "a.jsonl", [{"text": "a" * 20}] * 5)
    b = written(tmp_path / "b.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"b\.jsonl"):
        load(f"{a},{b}")


def test_spec_options_reach_the_text(tmp_path: Path):
    name = written(tmp_path / "a.json", [{"text": "hi"}, {"text": "yo"}])
    data = load(f'{name}:system_prompt="a, b: c":num=2', seqlen=64)
    prompted = [f"<s>system : a, b: c user : {text} " for text in ("hi", "yo")]
    expected = tiny_tokenizer()(prompted, add_special_tokens=False)["input_ids"]
    assert sorted(sample.tolist() for sample in data.samples) == sorted(expected)
    ids = written(tmp_path / "ids.jsonl", [{"input_ids": [5, 6, 7]}] * 4)
    assert [len(sample) for sample in load(f"{ids}:concat", None, nsamples=3, seqlen=4).samples] == [4, 4, 4]
    assert [len(sample) for sample in load(ids, None, nsamples=3, seqlen=4).samples] == [3, 3, 3]


def row_forms() -> Iterator[Any]:
    """Four equal rows in every accepted Python form."""
    texts = [WORDS[i:] + WORDS[:i] for i in range(4)]
    encoded = tiny_tokenizer()(texts, return_tensors="pt")
    ids = encoded["input_ids"]
    dicts = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    yield from (texts, [{"text": text} for text in texts], (text for text in texts))
    yield from (encoded, dict(encoded), ids, ids.numpy(), list(ids), ids.tolist(), [row[None] for row in ids], dicts)
    yield from (DataLoader(ids, batch_size=3), DataLoader(dicts, batch_size=2), DataLoader(texts, batch_size=2))
    yield from (DataLoader(TensorDataset(ids), batch_size=4), DataLoader(ids.tolist(), batch_size=3))
    yield DataLoader([{"input_ids": row} for row in ids.tolist()], batch_size=3)
    yield DataLoader(dicts, batch_size=2, collate_fn=list)


@pytest.mark.parametrize("options", [{"nsamples": 4}, {"nsamples": 128}, {"nsamples": 4, "seqlen": 4}, {"seqlen": 4}])
def test_a14_equal_content_gives_equal_samples_in_every_form(options: dict[str, int]):
    assert len({load(form, **options).sha256 for form in row_forms()}) == 1


@pytest.mark.parametrize("dataset", [None, 5, b"abc", {"a", "b"}, object()])
def test_a14_other_types_are_a_type_error_naming_the_accepted_ones(dataset: Any):
    with pytest.raises(TypeError, match=r"accepted is a string.*BatchEncoding.*DataLoader"):
        load(dataset)


def test_a14_data_frame_is_refused():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match="DataFrame"):
        load(pandas.DataFrame({"text": ["a"]}))


def test_a14_list_of_file_names_is_refused(tmp_path: Path):
    name = written(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match="join file names to one string with commas"):
        load([name, name])


def test_a14_shuffling_loader_follows_the_seed_and_leaves_the_random_state():
    rows = torch.arange(100, 120).repeat(30, 1) + torch.arange(30)[:, None]
    state = torch.get_rng_state()
    hashes = {load(DataLoader(rows, batch_size=4, shuffle=True), None, seed=1).sha256 for _ in range(2)}
    assert len(hashes) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_a16_local_file_and_builtin_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("network call")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert load(written(tmp_path / "a.jsonl", [{"text": WORDS}]), nsamples=1).samples
    data = load("builtin", nsamples=32, seqlen=256)
    assert [len(sample) for sample in data.samples] == [256] * 32


def test_builtin_is_fixed_by_the_seed_and_has_no_hub_options():
    first = load("builtin", seed=3)
    assert load("builtin", seed=3).sha256 == first.sha256
    assert load("builtin", seed=4).sha256 != first.sha256
    assert len(load("builtin:num=2", nsamples=2).samples) == 2
    with pytest.raises(ConfigError, match="split= and config= do not apply"):
        load("builtin:split=train")


def test_same_seed_same_samples_other_seed_other_rows():
    texts = [f"{i:02d}{WORDS}{WORDS}" for i in range(50)]
    assert load(texts).sha256 == load(list(texts)).sha256
    assert load(texts).sha256 != load(texts, seed=1).sha256


def test_sha256_covers_lengths():
    joined, split = load([[5, 6, 7]], None, nsamples=2), load([[5, 6], [7]], None, nsamples=2)
    assert joined.sha256 != split.sha256


def test_packing_of_text_is_exact():
    texts = ["abc"] * 9  # 4 tokens each
    data = load(texts, nsamples=4, seqlen=8)
    assert [sample.tolist() for sample in data.samples] == [tiny_tokenizer()("abc")["input_ids"] * 2] * 4


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
def test_token_ids_outside_the_vocabulary_are_refused(bad: int):
    with pytest.raises(DataError, match=rf"token id {bad} is outside the model's vocabulary \(0 to 127\)"):
        load([[5, bad, 6]], None, vocab_size=VOCAB_SIZE)
    assert load([[5, VOCAB_SIZE - 1]], None, vocab_size=VOCAB_SIZE).samples


@pytest.mark.parametrize("option", ["nsamples", "seqlen"])
def test_counts_below_one_are_refused(option: str):
    with pytest.raises(ConfigError, match=rf"{option} \(0\) must be at least 1"):
        load(["abc"], **{option: 0})


def test_endless_iterable_is_read_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoround_fp8.calibration.dataset._MIN_RECORDS", 100)
    num_read = 0

    def endless() -> Iterator[list[int]]:
        nonlocal num_read
        while True:
            num_read += 1
            yield list(range(16))

    assert len(load(endless(), None).samples) == 8
    assert num_read < 200


def test_folder_and_path_object(tmp_path: Path):
    written(tmp_path / "a.jsonl", [{"text": WORDS * 2}])
    assert load(tmp_path, nsamples=1).sha256 == load(str(tmp_path / "a.jsonl"), nsamples=1).sha256
