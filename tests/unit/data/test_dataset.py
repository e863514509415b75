"""The strict scan: every bad row is named before a run begins."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from penstock.data import DatasetConfig, PromptSet
from penstock.errors import ConfigError, DatasetError
from penstock.rollout import RolloutState, new_rollout, unpack_ids


def load(config: DatasetConfig, tokenizer: Any, **limits: Any) -> PromptSet:
    return config.load(tokenizer, **({"context": None, "max_tokens": 8, "data_sources": None} | limits))


def problems_of(path: Path, tokenizer: Any, *, limits: dict[str, Any] | None = None, **fields: Any) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        load(DatasetConfig(path=path, **fields), tokenizer, **(limits or {}))
    return [problem.replace(str(path), "F") for problem in caught.value.problems]


def from_question(row: Any) -> RolloutState:
    return new_rollout(row["question"], ground_truth=row["answer"], data_source="other")


def test_a_row_becomes_a_prompt_rendered_once(tokenizer, jsonl, good_row):
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = jsonl(good_row(id="a", tools=tools), good_row(prompt=[{"role": "system", "content": "Sum."}], tools=tools))
    prompts = load(DatasetConfig(path=path), tokenizer)
    assert len(prompts) == 2
    assert (prompts.dropped, prompts.quarantined, prompts.problems) == (0, 0, ())
    first, second = prompts.prompts
    assert first.messages == ({"role": "user", "content": "What is 1 + 1?"},)
    assert tokenizer.decode(unpack_ids(first.ids)[2:]) == "What is 1 + 1?"
    assert (first.ground_truth, first.data_source, first.tools) == ("2", "sums", tuple(tools))
    assert first.extra_info == {"id": "a", "index": 0}
    assert second.messages == ({"role": "system", "content": "Sum."},)


def test_what_repeats_from_row_to_row_is_held_once(tokenizer, jsonl, good_row):
    tools = [{"type": "function", "function": {"name": "add"}}]
    first, second = load(DatasetConfig(path=jsonl(*[good_row(tools=tools)] * 2)), tokenizer).prompts
    assert first.tools is second.tools
    assert first.data_source is second.data_source


def test_a_prompt_is_the_one_a_ledger_gives_back(tokenizer, jsonl, good_row):
    def with_tuples(row: Any) -> RolloutState:
        return new_rollout("q", ground_truth=(1, (2, 3)), data_source="d", extra_info={"pair": (1, 2)})

    (prompt,) = load(DatasetConfig(path=jsonl({}), to_rollout=with_tuples), tokenizer).prompts
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=type(prompt)) == prompt
    assert prompt.ground_truth == [1, [2, 3]]


def test_the_last_line_needs_no_line_end(tokenizer, jsonl, good_row):
    path = jsonl(good_row(), good_row())
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert len(load(DatasetConfig(path=path), tokenizer)) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": ', "bad JSON: Input data was truncated"),
        (b'{"prompt": NaN}', "bad JSON: JSON is malformed: invalid character (byte 11)"),
        (b"[" * 100_000, "bad JSON: maximum recursion depth exceeded while deserializing an object"),
        (b"", "blank line; every line must hold one row"),
        (b'{"prompt": "a\x00b"}', "NUL byte at byte 13"),
        (b'{"prompt": "a\xff"}', "bad UTF-8 at byte 13: invalid start byte"),
        (b"[1]", "the row is [1]; it must be an object"),
        (b"null", "the row is None; it must be an object"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tokenizer, jsonl, good_row, line, problem):
    assert problems_of(jsonl(good_row(), line, good_row()), tokenizer) == [f"F:2: {problem}"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": ...}, "prompt is missing; there is data_source, extra_info, reward_model"),
        ({"prompt": None}, "prompt is missing; there is data_source, extra_info, reward_model"),
        ({"prompt": 3}, "prompt is 3; it must be a text or a list of messages"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["hello"]}, "prompt[0] is 'hello'; it must be an object with role and content"),
        ({"prompt": [{"content": "x"}]}, "prompt[0].role is missing; there is content"),
        (
            {"prompt": [{"role": 1, "content": "x"}]},
            "prompt[0].role is 1; it must be one of system, developer, user, assistant, tool",
        ),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content is missing; there is role"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "prompt[0].content is ['x']; it must be a text"),
        ({"prompt": "a\0b"}, "a text holds a NUL character"),
        ({"reward_model": ...}, "reward_model is missing; there is data_source, extra_info, prompt"),
        ({"reward_model": "2"}, "reward_model is '2'; it must be an object with ground_truth"),
        ({"reward_model": {"style": "rule"}}, "reward_model.ground_truth is missing; there is style"),
        ({"reward_model": {"ground_truth": None}}, "reward_model.ground_truth is missing; there is nothing"),
        ({"data_source": ...}, "data_source is missing; there is extra_info, prompt, reward_model"),
        ({"data_source": ["a"]}, "data_source is ['a']; it must be a text that is not empty"),
        ({"data_source": ""}, "data_source is ''; it must be a text that is not empty"),
        ({"extra_info": [1]}, "extra_info is [1]; it must be an object"),
        ({"tools": {}}, "tools is {}; it must be a list of objects"),
        ({"tools": ["add"]}, "tools is ['add']; it must be a list of objects"),
        ({"id": True}, "id is True; it must be a text or a whole number"),
        ({"id": "first"}, "id 'first' is already used in line 1"),
        (
            {"prompt": [{"role": "human", "content": "x"}]},
            "prompt[0].role is 'human'; it must be one of system, developer, user, assistant, tool",
        ),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "the last message of prompt is the assistant's; an answer comes after a user's or a tool's",
        ),
        (
            {"prompt": [{"role": "tool", "content": "x"}]},
            "the chat template refuses it: roles must be system, user or assistant",
        ),
        (
            {"extra_info": {"n": 2**70}},
            "the prompt cannot be stored: can't serialize ints < -2**63 or > 2**64 - 1",
        ),
    ],
)
def test_a_bad_field_is_named(tokenizer, jsonl, good_row, changes, problem):
    path = jsonl(good_row(id="first"), good_row(**changes), good_row())
    assert problems_of(path, tokenizer) == [f"F:2: {problem}"]


def test_all_problems_of_all_rows_come_at_once(tokenizer, jsonl, good_row):
    path = jsonl(good_row(prompt=3, data_source=4), good_row(), b"{", good_row(reward_model=...))
    assert problems_of(path, tokenizer) == [
        "F:1: prompt is 3; it must be a text or a list of messages",
        "F:1: data_source is 4; it must be a text that is not empty",
        "F:3: bad JSON: Input data was truncated",
        "F:4: reward_model is missing; there is data_source, extra_info, prompt",
    ]


def test_ids_that_differ_only_in_type_are_duplicates(tokenizer, jsonl, good_row):
    assert problems_of(jsonl(good_row(id=7), good_row(id="7")), tokenizer) == ["F:2: id '7' is already used in line 1"]


def test_what_editors_add_and_nobody_sees_is_harmless(tokenizer, jsonl, good_row):
    row = json.dumps(good_row()).encode()
    plain = load(DatasetConfig(path=jsonl(row, row)), tokenizer)
    for lines, end in (
        ([b"\xef\xbb\xbf" + row, row], b"\n"),
        ([row, row], b"\r\n"),
        ([row, row, b""], b"\n"),
        ([b"\xef\xbb\xbf" + row, row, b"", b"  "], b"\r\n"),
    ):
        assert load(DatasetConfig(path=jsonl(*lines, end=end)), tokenizer).prompts == plain.prompts


def test_a_file_of_blank_lines_has_no_rows(tokenizer, jsonl):
    assert problems_of(jsonl(b"", b""), tokenizer) == ["F:1: the file has no rows"]


def test_utf16_is_named_once(tokenizer, jsonl):
    path = jsonl()
    path.write_text("".join(json.dumps({"prompt": "x"}) + "\n" for _ in range(3)), encoding="utf-16")
    assert problems_of(path, tokenizer) == ["F:1: the file is UTF-16; save it as UTF-8"]


def test_an_empty_file_is_named(tokenizer, jsonl):
    assert problems_of(jsonl(), tokenizer) == ["F:1: the file is empty"]


def test_a_line_of_exactly_the_limit_is_read(tokenizer, jsonl, good_row):
    line = json.dumps(good_row()).encode()
    assert len(load(DatasetConfig(path=jsonl(line, line), max_line_bytes=len(line)), tokenizer)) == 2
    path = jsonl(line, line)
    assert problems_of(path, tokenizer, max_line_bytes=len(line) - 1)[0] == (
        f"F:1: the line has {len(line)} bytes; max_line_bytes is {len(line) - 1}"
    )


def test_a_huge_line_is_skipped_without_being_held(tokenizer, jsonl, good_row):
    path = jsonl(good_row(), b"x" * 50_000_000, b"{", good_row())
    tracemalloc.start()
    found = problems_of(path, tokenizer, max_line_bytes=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [
        "F:2: the line has 50000000 bytes; max_line_bytes is 1000",
        "F:3: bad JSON: Input data was truncated",
    ]
    assert peak < 5_000_000


def test_a_huge_last_line_without_end_is_named(tokenizer, jsonl, good_row):
    path = jsonl(good_row())
    path.write_bytes(path.read_bytes() + b"x" * 2000)
    assert problems_of(path, tokenizer, max_line_bytes=1000) == ["F:2: the line has 2000 bytes; max_line_bytes is 1000"]


def test_a_long_list_of_problems_is_cut_and_counted_by_kind(tokenizer, jsonl, good_row):
    found = problems_of(jsonl(*[good_row(prompt=3)] * 60, b"{", good_row(data_source=1, prompt="")), tokenizer)
    assert len(found) == 51
    assert found[-1] == "F: and 13 more problems; in all: 61 mistyped field, 1 bad JSON, 1 empty prompt"


def test_an_over_long_prompt_is_refused_or_dropped_and_counted(tokenizer, jsonl, good_row):
    path = jsonl(good_row(prompt="12345"), good_row(prompt="123456"))
    assert problems_of(path, tokenizer, max_prompt_tokens=6) == ["F:2: the prompt has 7 tokens; max_prompt_tokens is 6"]
    prompts = load(DatasetConfig(path=path, max_prompt_tokens=6, over_long="drop"), tokenizer)
    assert (len(prompts), prompts.dropped, prompts.quarantined) == (1, 1, 0)


def test_prompt_and_answer_must_fit_the_context(tokenizer, jsonl, good_row):
    path = jsonl(good_row(prompt="12345"), good_row(prompt="123456"))
    assert problems_of(path, tokenizer, limits={"context": 14, "max_tokens": 8}) == [
        "F:2: the prompt has 7 tokens; with max_tokens 8 that exceeds the model's context of 14"
    ]
    prompts = load(DatasetConfig(path=path, over_long="drop"), tokenizer, context=14)
    assert (len(prompts), prompts.dropped) == (1, 1)


def test_dropping_every_prompt_is_refused(tokenizer, jsonl, good_row):
    found = problems_of(jsonl(good_row()), tokenizer, max_prompt_tokens=1, over_long="drop")
    assert found == ["F: no prompt is left (1 dropped as over-long, 0 quarantined)"]


def test_an_over_long_row_that_is_bad_otherwise_is_not_dropped_quietly(tokenizer, jsonl, good_row):
    path = jsonl(good_row(), good_row(prompt="a long one\0"))
    found = problems_of(path, tokenizer, max_prompt_tokens=15, over_long="drop", limits={"context": None})
    assert found == ["F:2: a text holds a NUL character"]


def test_a_data_source_without_a_judger_branch_is_named_with_the_nearest(tokenizer, jsonl, good_row):
    path = jsonl(good_row(), good_row(data_source="sum"))
    found = problems_of(path, tokenizer, limits={"data_sources": frozenset({"sums", "words"})})
    assert found == ["F:2: data_source 'sum' has no judger branch. Did you mean 'sums'?"]


def test_bad_rows_are_set_aside_only_up_to_the_cap(tokenizer, jsonl, good_row):
    path = jsonl(b"{", good_row(), good_row(prompt=3, data_source=3))
    prompts = load(DatasetConfig(path=path, quarantine=2), tokenizer)
    assert (len(prompts), prompts.quarantined, prompts.dropped) == (1, 2, 0)
    assert [problem.split(":")[1] for problem in prompts.problems] == ["1", "3", "3"]
    found = problems_of(path, tokenizer, quarantine=1)
    assert len(found) == 4
    assert found[-1] == "F: 2 bad rows; quarantine allows 1"


def test_every_quarantined_row_is_listed(tokenizer, jsonl, good_row):
    prompts = load(DatasetConfig(path=jsonl(good_row(), *[b"{"] * 80), quarantine=100), tokenizer)
    assert prompts.quarantined == len(prompts.problems) == 80


def test_a_quarantine_that_leaves_nothing_is_refused(tokenizer, jsonl):
    found = problems_of(jsonl(b"{"), tokenizer, quarantine=5)
    assert found == ["F: no prompt is left (0 dropped as over-long, 1 quarantined)"]


def test_another_layout_is_converted_by_a_function_or_its_dotted_path(tokenizer, jsonl):
    path = jsonl({"question": "Why?", "answer": "So."})
    for convert in (from_question, "penstock.rollout:new_rollout"):
        rows = path if convert is from_question else jsonl("Why?")
        (prompt,) = load(DatasetConfig(path=rows, to_rollout=convert), tokenizer).prompts
        assert prompt.messages == ({"role": "user", "content": "Why?"},)
        assert tokenizer.decode(unpack_ids(prompt.ids)[1:]) == "Why?"


def test_a_converter_that_raises_or_returns_something_else_is_named_per_row(tokenizer, jsonl):
    path = jsonl({"question": "Why?", "answer": "So."}, {"question": "How?"})
    found = problems_of(path, tokenizer, to_rollout=from_question)
    assert found == [f"F:2: {from_question.__module__}.from_question raised KeyError: 'answer'"]
    found = problems_of(path, tokenizer, to_rollout="builtins.len")
    assert found[0] == "F:1: builtins.len returned int; it must return a RolloutState"


def test_a_converted_prompt_is_checked_as_any_other(tokenizer, jsonl):
    def bad(row: Any) -> RolloutState:
        return new_rollout(row[0] if row else [], data_source="x" if row != ["typed"] else 5)  # type: ignore[arg-type]

    path = jsonl(["far too long"], [], ["typed"])
    assert problems_of(path, tokenizer, to_rollout=bad, max_prompt_tokens=5) == [
        "F:1: the prompt has 13 tokens; max_prompt_tokens is 5",
        "F:2: the prompt has no messages",
        "F:3: the prompt cannot be stored: Expected `str`, got `int` - at `$.data_source`",
    ]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet_rows_are_read_like_lines(tokenizer, tmp_path, good_row):
    chat = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hello", "name": "bot"}]
    path = write_parquet(tmp_path / "rows.parquet", [good_row(prompt=chat, id=i) for i in range(3000)])
    prompts = load(DatasetConfig(path=path), tokenizer)
    assert len(prompts) == 3000
    # A message does not get the keys that only other messages have.
    assert prompts.prompts[2999].messages == tuple(chat)
    assert prompts.prompts[2999].extra_info == {"id": 2999, "index": 0}


def test_bad_parquet_rows_are_named_by_row(tokenizer, tmp_path, good_row):
    rows = [good_row(id="a"), good_row(id="a"), good_row(prompt=None), good_row(prompt="\0")]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    assert problems_of(path, tokenizer) == [
        "F:2: id 'a' is already used in line 1",
        "F:3: prompt is missing; there is data_source, extra_info, reward_model",
        "F:4: a text holds a NUL character",
    ]


def test_bad_utf8_in_parquet_is_named_by_row(tokenizer, tmp_path):
    texts = pyarrow.array([b"fine", b"bad \xff", b"fine"], pyarrow.binary())
    strings = pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": strings}), path)
    found = problems_of(path, tokenizer, to_rollout=lambda row: new_rollout(row["prompt"], data_source="x"))
    assert found == ["F:2: bad UTF-8 at byte 4 of a value: invalid start byte"]


def test_a_damaged_or_empty_parquet_file_is_named(tokenizer, tmp_path, good_row):
    path = write_parquet(tmp_path / "rows.parquet", [good_row()])
    path.write_bytes(path.read_bytes()[:-20])
    (problem,) = problems_of(path, tokenizer)
    assert problem.startswith("F:1: cannot be read: not readable as Parquet: ")
    path.write_bytes(b"")
    assert problems_of(path, tokenizer) == ["F:1: the file is empty"]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert problems_of(path, tokenizer) == ["F:1: the file has no rows"]


def test_a_damaged_page_of_a_parquet_file_is_named(tokenizer, tmp_path, good_row):
    path = write_parquet(tmp_path / "rows.parquet", [good_row(prompt=f"{i} " * 50) for i in range(2000)])
    damaged = bytearray(path.read_bytes())
    damaged[200:1200] = b"\xff" * 1000
    path.write_bytes(damaged)
    # Nobody saw the rows behind it, so a quarantine does not cover it.
    for quarantine in (0, 5):
        (problem,) = problems_of(path, tokenizer, quarantine=quarantine)
        assert problem.startswith("F:1: cannot be read: ")


def test_a_path_that_cannot_work_is_a_config_problem(tokenizer, tmp_path, jsonl, good_row):
    jsonl(good_row())
    missing = tmp_path / "row.jsonl"
    with pytest.raises(ConfigError) as caught:
        DatasetConfig(path=missing).check()
    assert caught.value.problems == [f"path is {str(missing)!r}; there is no such file. Did you mean 'rows.jsonl'?"]
    with pytest.raises(ConfigError, match="no such file"):
        load(DatasetConfig(path=tmp_path / "no" / "rows.jsonl"), tokenizer)
    csv = tmp_path / "rows.csv"
    csv.write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"JSONL, Parquet or Arrow\. Known: \.arrow, \.jsonl, \.parquet\."):
        DatasetConfig(path=csv).check()
    with pytest.raises(ConfigError, match="path is an empty list"):
        DatasetConfig(path=[]).check()
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="loop") as caught:
        DatasetConfig(path=loop).check()
    assert "Did you mean" not in str(caught.value)


def test_a_converter_that_cannot_be_imported_is_a_config_problem(jsonl):
    path = jsonl({})
    with pytest.raises(ConfigError, match=r"to_rollout: 'no\.such\.thing' cannot be imported"):
        DatasetConfig(path=path, to_rollout="no.such.thing").check()
    with pytest.raises(ConfigError, match="it must name a function"):
        DatasetConfig(path=path, to_rollout="penstock.__version__").check()


def test_rows_of_another_layout_are_named_once_with_the_way_out(tokenizer, jsonl):
    gsm8k = jsonl(*[{"question": f"{n}?", "answer": "#### 4", "level": None} for n in range(100)])
    assert problems_of(gsm8k, tokenizer) == [
        "F: the rows have no data_source and no prompt and no reward_model; their columns are question, answer. Name "
        "the columns, as in DatasetConfig(prompt='question', label='answer', data_source='...'), or give to_rollout, a "
        "function that turns a row into a rollout"
    ]
    (problem,) = problems_of(gsm8k, tokenizer, prompt="question", label="anwser", data_source="gsm8k")
    assert "the rows have no anwser; their columns are" in problem
    assert "DatasetConfig(prompt='question', label='answer')" in problem
    trl = jsonl({"prompt": "x", "completion": "y"})
    assert "as in DatasetConfig(label='completion', data_source='...')" in problems_of(trl, tokenizer)[0]
    (problem,) = problems_of(jsonl({"a": 1}), tokenizer)
    assert "DatasetConfig(prompt='...', label='...', data_source='...')" in problem


def test_columns_may_have_other_names_and_the_data_source_be_given_once(tokenizer, jsonl, good_row):
    rows = [{"question": "Why?", "answer": "So."}, {"question": "How?", "answer": 4, "data_source": "own"}]
    config = DatasetConfig(path=jsonl(*rows), prompt="question", label="answer", data_source="gsm8k")
    first, second = load(config, tokenizer).prompts
    assert first.messages == ({"role": "user", "content": "Why?"},)
    assert (first.ground_truth, first.data_source) == ("So.", "gsm8k")
    assert (second.ground_truth, second.data_source) == (4, "own")
    path = jsonl(*rows, {"question": [], "answer": None})
    assert problems_of(path, tokenizer, prompt="question", label="answer", data_source="gsm8k") == [
        "F:3: question is empty",
        "F:3: answer is missing; there is question",
    ]


def test_column_names_beside_a_converter_are_refused(jsonl):
    with pytest.raises(ConfigError, match="to_rollout is given and label too"):
        DatasetConfig(path=jsonl({}), to_rollout=from_question, label="answer").check()


def test_several_files_and_directories_are_read_in_order(tokenizer, tmp_path, good_row):
    for name, question in (("b.jsonl", "b"), ("a.jsonl", "a"), ("c.parquet", "c"), ("sub/d.jsonl", "d")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = [good_row(prompt=question, id=n) for n in range(2)]
        if name.endswith("parquet"):
            write_parquet(tmp_path / name, rows)
        else:
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "README.md").write_text("not a row")
    (tmp_path / ".hidden.jsonl").write_text("not a row")
    prompts = load(DatasetConfig(path=[tmp_path / "sub" / "d.jsonl", tmp_path]), tokenizer)
    assert [prompt.messages[0]["content"] for prompt in prompts.prompts] == list("ddaabbcc")
    assert [prompts.place(n) for n in (1, 2, 7)] == [
        f"{tmp_path / 'sub/d.jsonl'}:2",
        f"{tmp_path / 'a.jsonl'}:1",
        f"{tmp_path / 'c.parquet'}:2",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the directory has no file that ends in \.jsonl, \.parquet, \.arrow"):
        DatasetConfig(path=tmp_path / "empty").check()


def save_like_datasets(directory: Path, rows: list[dict[str, Any]], **state: Any) -> Path:
    """The layout of `datasets.Dataset.save_to_disk`, in two shards."""
    directory.mkdir(parents=True)
    names = [f"data-{n:05}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (rows[:1], rows[1:]), strict=True):
        table = pyarrow.Table.from_pylist(part)
        with pyarrow.ipc.new_stream(str(directory / name), table.schema) as stream:
            stream.write_table(table)
    written = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"} | state
    (directory / "state.json").write_text(json.dumps(written))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def test_a_directory_that_datasets_saved_is_read(tokenizer, tmp_path):
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(5000)]
    path = save_like_datasets(tmp_path / "saved" / "train", rows)
    prompts = load(DatasetConfig(path=path, prompt="question", label="answer", data_source="gsm8k"), tokenizer)
    assert [prompt.ground_truth for prompt in prompts.prompts] == [str(n) for n in range(5000)]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"it holds the splits train; name one, as in '.*saved/train'"):
        DatasetConfig(path=tmp_path / "saved").check()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match="is of several splits, but there is none"):
        DatasetConfig(path=tmp_path / "torn").check()
    selected = save_like_datasets(tmp_path / "selected", rows, _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(ConfigError, match=r"flatten_indices\(\)"):
        DatasetConfig(path=selected).check()


def test_an_arrow_file_with_a_footer_is_read_and_a_damaged_one_named(tokenizer, tmp_path, good_row):
    path = tmp_path / "rows.arrow"
    table = pyarrow.Table.from_pylist([good_row(), good_row()])
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    assert len(load(DatasetConfig(path=path), tokenizer)) == 2
    path.write_bytes(b"nothing of the kind")
    (problem,) = problems_of(path, tokenizer)
    assert problem.startswith("F:1: cannot be read: not readable as Arrow: ")


def test_progress_is_told_while_rows_are_read(tokenizer, jsonl, good_row):
    told: list[int] = []
    load(DatasetConfig(path=jsonl(*[good_row()] * 2000)), tokenizer, on_progress=told.append)
    assert told == sorted(told)
    assert len(told) > 2
    assert told[-1] == 2000


def test_prompts_rendered_together_are_those_rendered_one_by_one(tokenizer, jsonl, good_row):
    class Fast(type(tokenizer)):
        together = 0

        def render_many(self, conversations):
            self.together += len(conversations)
            return [self.render(messages) for messages in conversations]

    rows = [good_row(prompt=f"{n}?") for n in range(1500)]
    path = jsonl(*rows, good_row(tools=[{"name": "add"}]), b"{", *rows)
    fast, one_by_one = Fast(), load(DatasetConfig(path=path, quarantine=1), tokenizer)
    assert load(DatasetConfig(path=path, quarantine=1), fast) == one_by_one
    assert fast.together == 3000
    refused = jsonl(*rows, good_row(prompt=[{"role": "tool", "content": "x"}]), *rows)
    assert problems_of(refused, Fast()) == [
        "F:1501: the chat template refuses it: roles must be system, user or assistant"
    ]


@pytest.mark.long_tier
def test_of_a_very_long_dataset_the_later_prompts_are_rendered_when_drawn(tokenizer, jsonl, good_row):
    class Fast(type(tokenizer)):
        rendered = 0

        def render(self, messages, tools=()):
            self.rendered += 1
            return super().render(messages, tools)

        def render_many(self, conversations):
            return [self.render(messages) for messages in conversations]

    rows = [good_row(prompt=f"{n}?") for n in range(20_000)]
    chat = good_row(prompt=[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    rows[15_000], rows[15_001] = good_row(prompt="long " * 20), chat
    slow, fast = load(DatasetConfig(path=jsonl(*rows)), tokenizer, context=200), Fast()
    quick = load(DatasetConfig(path=jsonl(*rows)), fast, context=200)
    assert fast.rendered < 11_000
    assert list(quick.prompts) == slow.prompts
    assert quick.prompts[-3:] == slow.prompts[-3:]
    assert quick.row_hashes() == slow.row_hashes()
    assert quick.rendering_hash() == slow.rendering_hash()
    # What is wrong with a later one is found by the scan all the same.
    rows[15_000] = good_row(prompt="long " * 50)
    rows[15_001] = good_row(prompt=[{"role": "tool", "content": "x"}])
    rows[15_002] = good_row(data_source="other")
    limits = {"context": 200, "data_sources": frozenset({"sums"})}
    assert problems_of(jsonl(*rows), Fast(), limits=limits) == problems_of(jsonl(*rows), tokenizer, limits=limits)
