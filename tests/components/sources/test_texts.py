from __future__ import annotations

from pathlib import Path

import pytest

from components.errors import ConfigError, DataError
from components.ingest import sources
from tests.components.sources import read


def _write(folder: Path, files: dict[str, str], encoding: str = "utf-8") -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode(encoding))
    return folder


def test_a_folder_for_each_class(tmp_path):
    _write(tmp_path, {"pos/b.txt": "good\nfilm\n", "neg/a.txt": "bad", ".git/x": "no text"})
    (tmp_path / ".git" / "x").rename(tmp_path / "neg" / ".hidden")
    (tmp_path / ".git").rmdir()
    assert read(sources.text, tmp_path).to_pylist() == [
        {"text": "bad", "label": "neg"},
        {"text": "good\nfilm\n", "label": "pos"},
    ]


def test_folders_for_splits_and_classes(tmp_path):
    _write(tmp_path, {"train/pos/1.txt": "a", "test/neg/1.txt": "b"})
    assert read(sources.text, tmp_path).to_pylist() == [
        {"text": "b", "split": "test", "label": "neg"},
        {"text": "a", "split": "train", "label": "pos"},
    ]


def test_a_text_a_line_labelled_by_its_file(tmp_path):
    _write(tmp_path, {"neg.txt": "bad\r\n\r\nworse", "pos.txt": "good\n"})
    table = read(sources.text, tmp_path, unit="line")
    assert table.to_pydict() == {"text": ["bad", "", "worse", "good"], "label": ["neg"] * 3 + ["pos"]}
    assert read(sources.text, tmp_path / "*.txt", unit="line")["text"].to_pylist() == ["bad", "", "worse", "good"]
    _write(tmp_path / "splits", {"train/neg.txt": "bad\n", "test/neg.txt": "worse\n"})
    assert read(sources.text, tmp_path / "splits", unit="line")["split"].to_pylist() == ["test", "train"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("unit", ["file", "line"])
def test_encodings(tmp_path, encoding, unit):
    _write(tmp_path, {"a.txt": "Grüße é"}, encoding)
    given = {} if encoding == "utf-8-sig" else {"encoding": encoding}
    assert read(sources.text, tmp_path / "a.txt", unit=unit, **given)["text"].to_pylist() == ["Grüße é"]


def test_what_is_no_text_is_refused(tmp_path):
    _write(tmp_path, {"a/x.txt": "Grüße"}, "latin-1")
    with pytest.raises(DataError, match=r"a/x.txt is not in utf-8: .*Set data.args.encoding"):
        read(sources.text, tmp_path)
    with pytest.raises(ConfigError, match="no encoding 'latin1e'"):
        read(sources.text, tmp_path, encoding="latin1e")
    with pytest.raises(ConfigError, match=r"data.args.unit: 'file' or 'line', received 'word'"):
        read(sources.text, tmp_path, unit="word")
    _write(tmp_path, {"top.txt": "x"})
    with pytest.raises(DataError, match="texts in folders of different depths"):
        read(sources.text, tmp_path)
