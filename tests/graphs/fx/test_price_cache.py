"""The file of measured prices: damage is noticed and mended, writers keep each other's prices, nothing is left behind."""

from __future__ import annotations

import json
import math
import multiprocessing
import pwd
import resource
import signal
import threading
from pathlib import Path

import pytest

from amprewrite import AmpRewriteWarning
from amprewrite.graphs.fx.run import measure as measuring
from amprewrite.graphs.fx.run.measure import cache_file, read_prices, write_prices


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache_file()
    assert found is not None
    found.parent.mkdir()
    return found


BAD = {
    "a string": '{"a": 1e-6, "b": "1e-6"}',
    "NaN": '{"a": NaN}',
    "infinite": '{"a": Infinity}',
    "huge": '{"a": 1e308}',
    "zero": '{"a": 0}',
    "negative": '{"a": -1e-6}',
    "a boolean": '{"a": true}',
    "a list": '{"a": [1e-6]}',
    "no mapping": "[1e-6]",
    "truncated": '{"a": 1e-',
    "empty": "",
    "deep": '{"a":' * 200_000,
    "many digits": '{"a": ' + "9" * 5000 + "}",
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_damaged_file_is_named_ignored_and_replaced(text, path):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(AmpRewriteWarning, match="timings.json is damaged"):
        assert read_prices() == {}
    write_prices({"new": 1e-6})
    assert read_prices() == {"new": 1e-6}


def test_prices_and_refusals_come_back(path):
    write_prices({"a": 1.5e-6, "refused": None})
    write_prices({"b": 2})
    assert read_prices() == {"a": 1.5e-6, "b": 2, "refused": None}
    assert [each.name for each in path.parent.iterdir()] == ["timings.json"]


def test_no_price_that_is_none_is_written(path):
    with pytest.raises(ValueError, match="no number of seconds"):
        write_prices({"a": math.inf})
    assert not path.exists()


def _write(name: str) -> None:
    for number in range(10):
        write_prices({f"{name} {number}": 1e-6})


def test_threads_and_processes_keep_what_others_wrote(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(f"process {n}",)) for n in range(3)]
    writers += [threading.Thread(target=_write, args=(f"thread {n}",)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_prices()) == 60
    assert len(list(path.parent.iterdir())) == 1


def _fill(done) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write_prices({f"call {number}": 1e-6 for number in range(1000)})
    done.value = 1


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing(path):
    write_prices({"old": 1e-6})
    context = multiprocessing.get_context("fork")
    done = context.Value("i", 0)
    writer = context.Process(target=_fill, args=(done,))
    writer.start()
    writer.join()
    assert done.value == 1
    assert json.loads(path.read_text()) == {"old": 1e-6}
    assert len(list(path.parent.iterdir())) == 1


def test_without_a_home_folder_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert cache_file() is None and read_prices() == {}
    write_prices({"a": 1e-6})


def test_a_folder_in_the_way_keeps_nothing(path):
    path.mkdir()
    assert read_prices() == {}
    write_prices({"a": 1e-6})
    assert path.is_dir() and measuring.read_prices() == {}
    assert len(list(path.parent.iterdir())) == 1
