"""`record_encoder.py`: texts and conversations become token ids; the tokenizer stays as it was."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import BOS, tiny_tokenizer

from autoround_fp8.calibration.record_encoder import RecordEncoder, tokenize
from autoround_fp8.errors import ConfigError, DataError


def test_text_gets_the_tokenizers_special_tokens_and_a_template_its_own():
    tokenizer = tiny_tokenizer()
    text, chat = RecordEncoder(tokenizer, "data").encode(["abc", [{"role": "user", "content": "abc"}]])
    assert text.tolist() == tokenizer("abc")["input_ids"]
    assert text[0] == BOS
    assert chat.tolist() == tokenizer("<s>user : abc ", add_special_tokens=False)["input_ids"]
    assert int((chat == BOS).sum()) == 1


def test_order_of_mixed_records_is_kept_over_chunks():
    records = [[torch.tensor([i]), "abc"][i % 2] for i in range(70)]
    encoder = RecordEncoder(tiny_tokenizer(), "data")
    assert [len(tokens) for tokens in encoder.encode(records)] == [1, 4] * 35
    assert encoder.num_encoded == 70


def test_apply_chat_template_and_system_prompt_wrap_text():
    tokenizer = tiny_tokenizer()
    (wrapped,) = RecordEncoder(tokenizer, "data", apply_chat_template=True).encode(["hi"])
    (prompted,) = RecordEncoder(tokenizer, "data", system_prompt="be").encode(["hi"])
    assert wrapped.tolist() == tokenizer("<s>user : hi ", add_special_tokens=False)["input_ids"]
    assert prompted.tolist() == tokenizer("<s>system : be user : hi ", add_special_tokens=False)["input_ids"]


def test_a8_missing_tokenizer_is_an_error_for_text_only():
    (tokens,) = RecordEncoder(None, "data").encode([torch.tensor([5, 6])])
    assert tokens.tolist() == [5, 6]
    with pytest.raises(ConfigError, match="data holds text, for which a tokenizer is needed"):
        list(RecordEncoder(None, "data").encode(["abc"]))


def test_chat_template_on_token_ids_is_refused():
    with pytest.raises(DataError, match="holds token ids, to which no chat template can be applied"):
        list(RecordEncoder(tiny_tokenizer(), "data", apply_chat_template=True).encode([torch.tensor([1])]))


def test_a8_tokenizer_is_unchanged_down_to_the_saved_file(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.model_max_length = 4
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    tokenizer.backend_tokenizer.enable_padding(pad_id=1, length=9)
    tokenizer.save_pretrained(tmp_path / "before")
    (tokens,) = tokenize(["abcdefgh"], tokenizer)
    assert len(tokens) == 9  # neither cut nor padded
    tokenizer.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()
    assert tokenizer.pad_token is None


def test_no_noise_about_long_texts(caplog: pytest.LogCaptureFixture):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 4
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        tokenize(["abcdefgh"], tokenizer)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
