"""bench/smollm2.py: where it may write. What it writes is in tests/test_smollm2.py."""

import pytest
from row_files import check_words, refusal

from bench import smollm2


@pytest.fixture
def hub(monkeypatch):
    """A hub that has a model of one file."""

    def download(repository, local_dir, **patterns):
        (local_dir / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "why_not_the_hub", lambda: "")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


@pytest.mark.parametrize(
    "name, words",
    [
        (".", [". is no name of a folder"]),
        ("..", [".. is no name of a folder"]),
        ("/", ["/ is no name of a folder"]),
        ("full", ["'full' holds other things, and no model"]),
        ("file", ["folder='file' can't be written"]),
        ("nowhere", ["folder='nowhere' can't be written", "a link that leads nowhere"]),
        ("/proc/x", ["folder='/proc/x' can't be written"]),
    ],
)
def test_a_folder_that_it_can_not_have_is_refused_first(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "why_not_the_hub", lambda: pytest.fail("the hub is asked"))
    place = tmp_path / "place"
    (place / "full").mkdir(parents=True)
    (place / "full" / "mine.txt").write_text("mine")
    (place / "file").write_text("mine")
    (place / "nowhere").symlink_to("gone")
    before = sorted(place.rglob("*"))
    monkeypatch.chdir(place)
    check_words(refusal(smollm2.main, [name]), *words)
    assert sorted(place.rglob("*")) == before


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["new", "empty", "link"])
def test_a_new_or_an_empty_folder_gets_the_model(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    smollm2.main([name])
    files = sorted(file.name for file in (tmp_path / name).iterdir())
    assert files == ["config.json", "source.txt"]


@pytest.mark.usefixtures("hub")
def test_what_broke_off_is_made_anew_and_what_is_not_ours_stays(tmp_path):
    ours = tmp_path / ("model" + smollm2.PART)
    theirs = tmp_path / "model.part"  # older versions left such a one too
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "half.txt").write_text("half")
    smollm2.main([str(tmp_path / "model")])
    assert not (tmp_path / "model" / "half.txt").exists()
    assert (tmp_path / "model" / "config.json").exists()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "model", theirs]
    assert (theirs / "half.txt").read_text() == "half"
