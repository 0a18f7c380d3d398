"""Rows of .parquet files, folders of save_to_disk and the Hugging Face hub, reachable or not."""

import datetime
import http.server
import json
import socket
import threading
import time

import datasets
import huggingface_hub
import pyarrow.parquet
import pytest
from row_files import check_words, jsonl, load, parquet, refusal

from preflight import load_model_files


@pytest.fixture(autouse=True)
def no_cache_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")


# --- files and folders


def test_a_parquet_file_gives_the_rows_of_a_jsonl_file(tmp_path):
    rows = []
    for i in range(5):
        answer = {"numbers": [i, 1], "target": i + 1}
        row = {"prompt": f"{i}+1", "answer": answer, "id": f"row {i}", "task": "countdown"}
        rows.append(row)
    path = parquet(tmp_path, **{key: [row[key] for row in rows] for key in rows[0]})
    assert load(path) == rows
    assert load(jsonl(tmp_path, *rows)) == rows


def test_rows_of_a_parquet_file_without_prompt_or_answer_are_left_out_and_counted(tmp_path, capsys):
    path = parquet(tmp_path, prompt=["a", None, "", "d", "e"], answer=["1", "1", "1", None, ""])
    assert [row["prompt"] for row in load(path)] == ["a"]
    assert "4 of 5" in capsys.readouterr().out
    message = refusal(load, parquet(tmp_path, prompt=["", None], answer=["1", "1"]))
    check_words(message, "none of its 2 rows", "'prompt'", "'answer'", "rows.parquet")


@pytest.mark.parametrize("name", ["rows.json", "row.jsonl"])
def test_a_path_that_is_not_there_is_told_with_what_lies_beside_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked"))
    there = jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    message = refusal(load, str(tmp_path / name))
    check_words(message, str(tmp_path / name), f"did you mean {str(there)!r}?")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_that_is_not_there_is_told_with_where_it_was_looked_for(
    ending, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    check_words(refusal(load, f"rows.{ending}"), f"rows.{ending}", str(tmp_path))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_link_that_leads_nowhere_is_told_where_it_leads(ending, tmp_path):
    link = tmp_path / f"rows.{ending}"
    link.symlink_to("/nowhere/rows")
    said = refusal(load, str(link))
    check_words(said, str(link), "link to '/nowhere/rows'")
    assert "did you mean" not in said


def test_brackets_in_the_name_of_a_file_are_no_pattern(tmp_path):
    first, other = tmp_path / "rows[1].parquet", tmp_path / "rows1.parquet"
    for file in (first, other):
        datasets.Dataset.from_dict({"prompt": [file.name], "answer": ["1"]}).to_parquet(file)
    assert [row["prompt"] for row in load(str(first))] == [first.name]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_folder_may_be_called_like_a_file(ending, tmp_path):
    """As Spark and Dask call the one that they write the parts into."""
    folder = tmp_path / f"rows.{ending}"
    folder.mkdir()
    for part in range(2):
        row = {"prompt": f"{part}", "answer": "1"}
        datasets.Dataset.from_list([row]).to_parquet(folder / f"part-{part}.snappy.parquet")
    assert [row["prompt"] for row in load(str(folder))] == ["0", "1"]
    assert [row["prompt"] for row in load(str(folder), split="train[:1]")] == ["0"]
    # a pattern and an address are not looked for as a path
    assert len(load(str(folder / "part-*.snappy.parquet"))) == 2
    assert len(load(f"file://{folder}/part-0.snappy.parquet")) == 1
    said = refusal(load, str(folder), config="sums")
    check_words(said, "'sums'", "dataset.config='' clears one left over")


def test_a_cache_that_can_not_be_written_is_named_with_the_cure(tmp_path, monkeypatch):
    """As in a container, for a user without a home."""
    (tmp_path / "home").touch()
    cache = tmp_path / "home" / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    said = refusal(load, parquet(tmp_path, prompt=["a"], answer=["1"]))
    check_words(said, f"HF_DATASETS_CACHE={str(cache)!r} can't be written", "set HF_HOME to")
    # another error of the system is not the cache's
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "new")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: open(tmp_path / "gone"))
    assert "HF_HOME" not in refusal(load, parquet(tmp_path, prompt=["a"], answer=["1"]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_a_part_of_what_has_no_parts_is_refused(kind, tmp_path):
    columns = {"prompt": ["a", "b"], "answer": ["1", "2"]}
    path = str(tmp_path / "folder")
    if kind == "jsonl":
        path = jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    elif kind == "parquet":
        path = parquet(tmp_path, **columns)
    else:
        datasets.Dataset.from_dict(columns).save_to_disk(path)
    assert load(path, split="test")
    check_words(refusal(load, path, split="train[:1]"), path, "has no splits", "train[:1]")


def test_dots_lead_into_a_column_of_which_no_two_rows_are_alike(tmp_path):
    """datasets gives it a type that says nothing of what is in it."""
    rows = [
        {"prompt": "a", "rm": {"gt": "2"}},
        {"prompt": "b", "rm": {"gt": "4", "x": 1}},
        {"prompt": "c", "rm": {"gt": "5", "x": "y"}},
    ]
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load(str(folder), answer="rm.gt")
    assert [row["answer"] for row in found] == ["2", "4", "5"]
    check_words(refusal(load, str(folder), answer="other.gt"), "no column 'other.gt'")


def test_texts_that_the_library_takes_for_something_else_are_told(tmp_path, capsys):
    """It makes 7 of "007" where another row holds a number, and datetimes of dates."""
    for number, answers in enumerate(
        (["007", 8], ["2020-01-01"], ["7", "8"], [{"a": 1}, {"b": 2}], [["7"], {"a": "7"}])
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        name = jsonl(folder, *({"prompt": "a", "answer": answer} for answer in answers))
        assert [row["answer"] for row in load(name)] == answers
        changed = [row["answer"] for row in load(str(folder))] != answers
        said = capsys.readouterr().out
        assert changed == (number < 2) == ("warning" in said), said
        if changed:
            check_words(said, str(folder), "'answer'", "name a .jsonl file itself")
    dates = parquet(tmp_path, prompt=["a"], answer=[datetime.datetime(2026, 1, 1)])
    assert load(dates) and "warning" not in capsys.readouterr().out  # nobody has guessed


def test_texts_within_a_column_that_the_library_takes_for_numbers_are_told(tmp_path, capsys):
    """As in verl's files, where a ground truth may be a text or a list of texts."""
    for number, inner in enumerate((["7", ["8"]], [[{"is": "7"}], [{"is": ["8"]}]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [{"prompt": "a", "rm": {"gold": gold}} for gold in inner]
        jsonl(folder, {"prompt": "a", "rm": None}, *rows)
        assert load(str(folder), answer="rm.gold")[0]["answer"] in (7, [{"is": 7}])
        check_words(capsys.readouterr().out, "warning", "'rm'", "name a .jsonl file itself")
    jsonl(folder, *({"prompt": "a", "answer": {name: "7"}} for name in "bc"), {"prompt": "a"})
    assert [row["answer"] for row in load(str(folder))] == [{"b": "7"}, {"c": "7"}]
    assert "warning" not in capsys.readouterr().out


def test_a_misspelt_column_within_one_that_is_kept_as_json_is_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    rows = [{"prompt": "a", "answer": "1", "x": {"m": 1}}, {"prompt": "b", "answer": "1", "x": [2]}]
    jsonl(tmp_path / "rows", *rows)
    assert [row["x.m"] for row in load(str(tmp_path / "rows"), more=["x.m"])] == [1, None]
    check_words(refusal(load, str(tmp_path / "rows"), more=["x.n"]), "no row", "'x.n'")


def test_a_column_that_the_config_asks_for_is_none_where_a_row_lacks_it(tmp_path):
    """In a file too, as in a folder: a reward names it among its arguments."""
    name = jsonl(tmp_path, {"prompt": "a", "answer": "1", "m": 2}, {"prompt": "b", "answer": "1"})
    for source in (name, str(tmp_path)):
        assert [row["m"] for row in load(source, more=["m"])] == [2, None]


def test_a_column_of_which_no_row_has_a_value_is_there(tmp_path):
    """As `tools` may be in verl's files."""
    row = {"prompt": "a", "answer": "1", "tools": None, "info": {"x": None}}
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([row]).to_parquet(file)
    for source in (jsonl(tmp_path, row), str(file)):
        (loaded,) = load(source, more=["tools", "info.x"])
        assert (loaded["tools"], loaded["info.x"]) == (None, None)
    check_words(refusal(load, jsonl(tmp_path, row), more=["info.y"]), "no row", "'info.y'")
    two = datasets.Dataset.from_list([row, row | {"info": None}])
    two.select([1]).to_parquet(file)  # a null where others have columns within
    assert [loaded["info.x"] for loaded in load(str(file), more=["info.x"])] == [None]


def test_a_column_within_a_column_that_is_misspelt_is_told_what_there_is(tmp_path):
    row = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "2"}}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    said = refusal(load, str(tmp_path / "rows.parquet"), answer="reward_model.truth")
    check_words(said, "no column 'reward_model.truth'", "reward_model.ground_truth")


def test_a_folder_of_save_to_disk_is_read_with_or_without_splits(tmp_path):
    columns = {"prompt": ["1+1", "2+2"], "answer": ["2", "4"], "bulk": [[0.5] * 9] * 2}
    dataset = datasets.Dataset.from_dict(columns)
    one = str(tmp_path / "one")
    two = str(tmp_path / "two")
    dataset.save_to_disk(one)
    datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(two)
    rows = [
        {"id": "0", "task": "", "prompt": "1+1", "answer": "2"},
        {"id": "1", "task": "", "prompt": "2+2", "answer": "4"},
    ]
    assert load(one) == rows
    assert load(two) == rows
    assert [row["prompt"] for row in load(two, split="test")] == ["2+2"]
    check_words(refusal(load, two, split="dev"), two, "'dev'", "train, test")
    for part, prompts in {"train[1:]": ["2+2"], "train[:50%]+test": ["1+1", "2+2"]}.items():
        assert [row["prompt"] for row in load(two, split=part)] == prompts
    datasets.DatasetDict({"train-2": dataset}).save_to_disk(tmp_path / "odd")
    assert len(load(str(tmp_path / "odd"), split="train-2")) == 2
    check_words(refusal(load, two, split="dev[:1]"), "no split 'dev[:1]'", "train, test")
    for part in ("train[5:]", "train[1:1]"):
        check_words(refusal(load, two, split=part), f"split={part!r} has no rows", "'train': 2")
    other = datasets.Dataset.from_dict({"prompt": ["1+1"], "answer": [2]})
    datasets.DatasetDict(train=dataset, test=other).save_to_disk(tmp_path / "unlike")
    said = refusal(load, str(tmp_path / "unlike"), split="train+test")
    check_words(said, "split='train+test'", "can't be joined", "answer")


def test_without_a_test_split_it_is_told_what_to_evaluate(tmp_path):
    saved, folder = tmp_path / "saved", tmp_path / "folder"
    dataset = datasets.Dataset.from_dict({"prompt": ["1+1", "2+2"], "answer": ["2", "4"]})
    datasets.DatasetDict(train=dataset).save_to_disk(saved)
    folder.mkdir()
    dataset.to_parquet(folder / "train.parquet")
    for name in map(str, (saved, folder)):
        check_words(refusal(load, name, split="test"), name, "--eval_dataset.split", "train[:256]")
        assert len(load(name, split="train[:1]")) == 1
    assert "eval_dataset" not in refusal(load, str(folder), split="train[5:]")


@pytest.mark.parametrize("part", ["train[:120%]", "train[:1", "train[::2]", "train[:.5%]"])
def test_a_part_that_is_not_written_as_one_is_refused(part, tmp_path):
    dataset = datasets.Dataset.from_dict({"prompt": ["1+1", "2+2"], "answer": ["2", "4"]})
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    dataset.to_parquet(tmp_path / "folder" / "train.parquet")
    for name in (str(tmp_path / "saved"), str(tmp_path / "folder")):
        said = refusal(load, name, split=part)
        check_words(said, f"{name!r}: split={part!r}", "not written as a part", "at most 100%")


def test_a_folder_whose_name_is_a_pattern_is_not_taken_for_another(tmp_path, monkeypatch):
    """The datasets library would read the rows of run1 for those of run[1]."""
    odd = tmp_path / "run[1]"
    for folder, prompt in ((odd, "ours"), (tmp_path / "run1", "others")):
        folder.mkdir()
        parquet(folder, prompt=[prompt], answer=["1"])
    check_words(refusal(load, str(odd)), repr(str(odd)), "for a pattern", "rename it")
    monkeypatch.chdir(odd)
    for name in (".", "rows.parquet", str(odd / "rows.parquet")):
        if name == ".":
            check_words(refusal(load, name), repr(str(odd)), "rename it")
        else:
            assert [row["prompt"] for row in load(name)] == ["ours"]


def test_rows_that_differ_from_what_the_readme_counts_are_told(tmp_path):
    """As where somebody has shortened the files of a dataset, or not fetched all of them."""
    jsonl(tmp_path, {"prompt": "a", "answer": "1"})
    info = "dataset_info:\n  splits:\n  - name: train\n    num_examples: 7473\n    num_bytes: 9\n"
    (tmp_path / "README.md").write_text(f"---\n{info}---\n")
    check_words(refusal(load, str(tmp_path)), "README.md", "dataset_info", "complete them")


def test_a_csv_is_told_how_it_is_read(tmp_path):
    folder = tmp_path / "sums"
    folder.mkdir()
    file = folder / "sums.csv"
    file.write_text("prompt,answer\n1+1?,2\n")
    check_words(refusal(load, str(file)), "sums.csv", "name the folder")
    assert [row["prompt"] for row in load(str(folder))] == ["1+1?"]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path, kind):
    columns = {"problem": ["1+1"], "gold": ["2"]}
    path = parquet(tmp_path, **columns)
    if kind == "folder":
        path = str(tmp_path / "folder")
        datasets.Dataset.from_dict(columns).save_to_disk(path)
    message = refusal(load, path, prompt="prompt", answer="gold")
    check_words(message, repr(path), "'prompt'", "problem, gold")
    message = refusal(load, path, prompt="problem", answer="answer")
    check_words(message, repr(path), "'answer'", "problem, gold")
    message = refusal(load, path, prompt="problem", answer="gold", more=["level"])
    assert "'level'" in message


def test_prompts_of_a_dataset_that_are_not_text_are_refused(tmp_path):
    message = refusal(load, parquet(tmp_path, prompt=[{"text": "hi"}], answer=["1"]))
    check_words(message, "'prompt'", "dict", "name a column")


def test_a_field_of_the_wrong_type_in_a_parquet_file_is_refused_with_its_row(tmp_path):
    path = parquet(tmp_path, prompt=["a", "b"], answer=["1", "1"], num_modes=["2", "3"])
    check_words(refusal(load, path), path, "row 0", "'num_modes' must be a whole number")


def test_a_parquet_file_with_bytes_for_text_is_one_sentence(tmp_path):
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    prompts = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "answer": ["1"]}), path)
    check_words(refusal(load, path), path, "UTF-8")


def test_a_folder_with_the_name_of_a_reader_is_a_folder(tmp_path, monkeypatch):
    """The datasets library would read all .csv files of the current folder instead."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "rows.csv").write_text("prompt,answer\na,1\n")
    (tmp_path / "other.csv").write_text("prompt,answer\nb,2\n")
    assert [row["prompt"] for row in load("csv")] == ["a"]
    check_words(refusal(load, "json"), "'json'", "the name of a file format")


def test_a_date_that_python_can_not_hold_is_one_sentence(tmp_path):
    path = str(tmp_path / "rows.parquet")
    far = pyarrow.array([2**30], type=pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1"], "answer": far}), path)
    check_words(refusal(load, path), path, "can't be read", "OverflowError")


def test_files_that_are_not_there_or_not_what_they_seem_are_one_sentence(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dataset_info.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    jsonl(tmp_path / "half", '{"prompt": "a", "ans')
    for name in ("broken.parquet", "nowhere.parquet", "folder", "empty", "half"):
        message = refusal(load, str(tmp_path / name))
        assert name in message
        assert "not a task" not in message
    assert "JSON parse error" in message  # not only that the library could not generate a dataset


def test_an_address_of_a_jsonl_file_is_no_path():
    message = refusal(load, "https://example.com/rows.jsonl")
    check_words(message, "addresses are read of .parquet files only", "download this file")
    assert "looked for" not in message


def test_datasets_in_offline_mode_are_one_sentence():
    check_words(refusal(load, "nobody/nothing"), "'nobody/nothing'", "countdown", "HF_HUB_OFFLINE")
    assert "dataset.name" in refusal(load, "")


# --- the hub

CARD = """---
configs:
- config_name: sums
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
FILES = {
    "README.md": CARD,
    "train.jsonl": '{"question": "1+1", "gold": "2", "bulk": 1}\n',
    "test.jsonl": '{"question": "2+2", "gold": "4", "bulk": 1}\n',
}
COMMIT = "a" * 40


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as one small dataset needs, which can't be reached here.

    The fixture `hub` sets two lists: `troubles`, what happens to the first requests, a status, or 0
    for hanging up; `asked`, (method, path) of each request."""

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append((self.command, path))
        if not self.troubles:
            return self.reply(*self.answer(path))
        status = self.troubles.pop(0)
        if status:
            self.reply(status, "", {})

    do_HEAD = do_GET

    def answer(self, path: str) -> tuple:
        """(status, body, headers)"""
        if "/resolve/" in path:
            body = FILES.get(path.rpartition("/")[2], "")
            headers = {"ETag": path, "X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}
            return (200 if body else 404), body, headers
        if "/tree/" in path:
            files = []
            for name, text in FILES.items():
                files.append({"type": "file", "path": name, "size": len(text), "oid": "1"})
            return 200, json.dumps(files), {}
        if path.startswith("/api/datasets/"):
            siblings = [{"rfilename": name} for name in FILES]
            return 200, json.dumps({"id": "some/sums", "sha": COMMIT, "siblings": siblings}), {}
        return 200, "", {}

    def reply(self, status: int, body: str, headers: dict) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """(FakeHub, list of the pauses that were made), in the place of huggingface.co."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    poll = {"poll_interval": 0.01}
    threading.Thread(target=server.serve_forever, kwargs=poll, daemon=True).start()
    pauses = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    FakeHub.troubles = []
    FakeHub.asked = []
    yield FakeHub, pauses
    server.shutdown()
    server.server_close()


def of_hub(config="sums", split="train", name="some/sums") -> list[dict]:
    return load(name, config=config, split=split, prompt="question", answer="gold")


def test_a_dataset_of_the_hub_is_asked_for_again_when_the_hub_is_busy(hub):
    fake, pauses = hub
    fake.troubles = [503, 503, 500]
    row = {"id": "0", "task": "", "prompt": "1+1", "answer": "2", "question": "1+1", "gold": "2"}
    assert of_hub() == [row]
    card = ("HEAD", "/datasets/some/sums/resolve/main/README.md")
    assert fake.asked[:4] == [card] * 4
    assert 0 < pauses[0] < pauses[1]
    assert [row["prompt"] for row in of_hub(split="test")] == ["2+2"]
    check_words(refusal(of_hub, split="dev"), "'some/sums'", "split='dev'", "train")
    check_words(refusal(of_hub, "products"), "'some/sums'", "config='products'", "sums")


def test_a_dataset_of_the_hub_that_was_read_once_is_there_without_a_network(hub, monkeypatch):
    fake, _ = hub
    of_hub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    requests = len(fake.asked)
    assert [row["prompt"] for row in of_hub()] == ["1+1"]
    assert len(fake.asked) == requests
    check_words(refusal(of_hub, config="", name="some/other"), "'some/other'", "HF_HUB_OFFLINE")


@pytest.mark.parametrize("trouble", [503, 0])
def test_a_hub_that_stays_out_of_reach_is_one_sentence_after_growing_pauses(hub, trouble):
    fake, pauses = hub
    fake.troubles = [trouble] * 99
    assert "'some/sums'" in refusal(of_hub)
    if trouble:
        assert len(pauses) >= 4
        assert pauses == sorted(pauses)


@pytest.fixture
def no_network(hub, monkeypatch):
    """The pauses that were made, where nothing listens at the hub's address."""
    with socket.socket() as closed:  # bound, so that nobody else gets it, and not listening
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", nowhere)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nowhere)
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        yield hub[1]


def test_a_dataset_without_a_network_is_one_sentence_and_nobody_waits(no_network, capsys):
    assert "can't be reached" in refusal(of_hub)
    assert no_network == []
    assert capsys.readouterr().out.count("can't be reached") == 1


@pytest.mark.parametrize(
    "endpoint", ["http://x:abc", "http://x:99999", "http://a..b", "http://[x", "x.y"]
)
def test_an_address_of_the_hub_that_is_none_is_one_sentence(no_network, monkeypatch, endpoint):
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    for read in (of_hub, lambda: load_model_files("some/model")):
        assert f"HF_ENDPOINT={endpoint!r} is not an address: " in refusal(read)


def test_a_model_without_a_network_is_one_sentence_and_nobody_waits(no_network, capsys):
    assert "model='some/model'" in refusal(load_model_files, "some/model")
    assert no_network == []
    assert capsys.readouterr().out.count("can't be reached") == 1
