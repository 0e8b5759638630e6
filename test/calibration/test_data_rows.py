"""`data_rows.py`: every shape of a row or batch becomes the same record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from autoround_fp8.calibration.data_rows import iter_records
from autoround_fp8.errors import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def records(item: Any) -> list[Any]:
    return [r.tolist() if isinstance(r, torch.Tensor) else r for r in iter_records(item, "data")]


@pytest.mark.parametrize(
    "item",
    [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": "hi", "response": "hello"},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"messages": [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]]},
        {"prompt": ["hi"], "response": ["hello"]},
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, CHAT[1]]},
        {"messages": [{**CHAT[0], "tool_calls": None, "name": None}, CHAT[1]]},
        {"messages": None, "prompt": "hi", "response": "hello"},
    ],
)
def test_conversations_in_all_known_shapes_are_equal(item: Any):
    assert records(item) == [CHAT]


@pytest.mark.parametrize(
    "item",
    [
        [[1, 2, 3], [4, 5, 6]],
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
        np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32),
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])],
        [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])],
        (torch.tensor([[1, 2, 3], [4, 5, 6]]),),
        {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])},
        {"input_ids": [[1, 2, 3], [4, 5, 6]]},
        [{"input_ids": [1, 2, 3]}, {"input_ids": torch.tensor([[4, 5, 6]])}],
        BatchEncoding({"input_ids": [[1, 2, 3], [4, 5, 6]], "attention_mask": [[1, 1, 1], [1, 1, 1]]}),
        {"input_ids": [[1, 2, 3, 0], [0, 4, 5, 6]], "attention_mask": [[1, 1, 1, 0], [0, 1, 1, 1]]},
        {
            "input_ids": torch.tensor([[0, 1, 2, 3, 0], [4, 5, 6, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool),
        },
    ],
)
def test_token_ids_in_all_known_shapes_are_equal(item: Any):
    assert records(item) == [[1, 2, 3], [4, 5, 6]]


def test_texts_in_columns_rows_and_lists_are_equal():
    assert records({"text": ["a", "b"]}) == records(["a", "b"]) == records([{"text": "a"}, {"text": "b"}]) == ["a", "b"]


@pytest.mark.parametrize(
    "item",
    [
        None,
        "",
        "  \n",
        {"text": None},
        {"text": "  "},
        {"text": ""},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"prompt": " "},
        {"input_ids": []},
        {"input_ids": [5, 5], "attention_mask": [0, 0]},
        {"text": None, "messages": None},
        [],
    ],
)
def test_blank_rows_are_none(item: Any):
    assert records(item) == [None]


def test_nulls_in_a_column_are_blank_rows():
    assert records({"text": ["a", None, ""]}) == ["a", None, None]
    assert records({"input_ids": [[1], None]}) == [[1], None]


def test_unknown_columns_error_lists_found_and_accepted():
    with pytest.raises(
        DataError, match=r"data has the columns foo, bar; accepted are .*messages, conversations, text, prompt"
    ):
        records({"foo": 1, "bar": 2})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "masked tokens between real ones"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, r"shape \[2\] for input_ids of shape \[3\]"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1]]}, "2 rows of input_ids but 1 rows of attention_mask"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), r"shape \[2, 2, 2\]"),
        (torch.zeros(2, 2), "torch.float32"),
        ({"input_ids": ["a", "b"]}, "not whole numbers"),
        ({"input_ids": [True, False]}, "torch.bool"),
        ({"text": 5}, "text of type int"),
        ({"messages": "hello"}, "lists of {role, content}"),
        ({"messages": [{"who": "me"}]}, "lists of {role, content}"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is int"),
        ({"prompt": ["a", "b"], "response": ["c"]}, "same length"),
        ((torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)), "tuples of 2 tensors"),
    ],
)
def test_senseless_values_are_refused(item: Any, message: str):
    with pytest.raises(DataError, match=message):
        records(item)


def test_other_types_are_a_type_error_that_names_the_accepted_ones():
    with pytest.raises(TypeError, match=r"holds float; accepted is a string.*DataLoader"):
        records([1.5])


def test_records_do_not_share_memory_with_the_users_tensor():
    tensor = torch.tensor([1, 2, 3])
    (record,) = iter_records(tensor, "data")
    tensor.zero_()
    assert isinstance(record, torch.Tensor)
    assert record.tolist() == [1, 2, 3]
