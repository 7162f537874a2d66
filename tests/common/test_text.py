"""The tokenizer, the corpus, the sources and the token files."""

import base64
import gzip
import hashlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from common import bench, text
from common.bench import Refusal

EOT = 50256
# a child that needs no torch: its import costs seconds
LIGHT = (
    "import os, pickle, sys, types;"
    "bench = sys.modules['common.bench'] = types.ModuleType('bench');"
    "bench.Refusal = Exception;"
    "from common import text;"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("BENCH_CACHE", str(folder))
    for name in ("TEXT_ASSUME_ONLINE", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch):
    """Anything that would leave the machine fails, and is listed."""
    asked = []

    def refused(*args, **kwargs):
        asked.append(args)
        raise OSError("the network is blocked in tests")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    return asked


def partials(folder):
    return [path for path in folder.rglob("*") if ".partial" in path.name]


def expected(documents):
    encode = text.encoding().encode_ordinary
    ids = [[*encode(document), EOT] for document in documents]
    starts = np.cumsum([0, *map(len, ids)])[:-1]
    return np.concatenate([np.array(i, np.uint16) for i in ids]), starts


# The tokenizer and the corpus


def test_known_ids(no_sockets):
    encoding = text.encoding()
    assert encoding.encode("Hello world") == [15496, 995]
    assert encoding.encode(" the") == [262]
    assert encoding.eot_token == text.EOT == EOT
    assert encoding.n_vocab == text.VOCAB_SIZE == 50257
    assert encoding is text.encoding()
    assert not no_sockets


def test_ids_equal_tiktokens_own(tmp_path, monkeypatch):
    """The unmodified call on a seeded cache; it checks the table's hash."""
    import tiktoken
    from tiktoken_ext import openai_public

    url = "https://openaipublic.blob.core.windows.net/encodings/"
    name = hashlib.sha1((url + "r50k_base.tiktoken").encode()).hexdigest()
    packed = (text._ASSETS / "gpt2.tiktoken.gz").read_bytes()
    (tmp_path / name).write_bytes(gzip.decompress(packed))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    own = tiktoken.Encoding(**openai_public.r50k_base())
    samples = [
        *text.corpus()[60:90],
        "  indented\n\n\tdef f(x):\r\n  ",
        "'ll I'D",
    ]
    samples += [
        "量化及記憶體",
        "naïve café 12345 ½",
        "<|endoftext|>",
        "🙂\u200b ",
    ]
    for sample in samples:
        ids = text.encoding().encode_ordinary(sample)
        assert ids == own.encode_ordinary(sample)
        assert text.encoding().decode(ids) == sample


def test_the_encoding_pickles_without_a_network(no_sockets):
    again = pickle.loads(pickle.dumps(text.encoding()))
    assert again.encode("Hello world") == [15496, 995]
    assert not no_sockets


def test_a_damaged_rank_table_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_ASSETS", tmp_path)
    build = text.encoding.__wrapped__
    with pytest.raises(Refusal, match="gpt2.tiktoken.gz is missing"):
        build()
    line = base64.b64encode(b"!") + b" 0\n"
    (tmp_path / "gpt2.tiktoken.gz").write_bytes(gzip.compress(line))
    with pytest.raises(Refusal, match="gpt2.tiktoken.gz is damaged"):
        build()


def test_the_corpus_is_whole_plays_scene_by_scene():
    scenes = text.corpus()
    assert scenes == list(text.documents("embedded"))
    assert len(scenes) == 158 and max(map(len, scenes)) < 30_000
    whole = "".join(scenes)
    assert len(whole) == 1_037_351 and whole.isascii()
    assert hashlib.sha256(whole.encode()).hexdigest() == (
        "b5b11b1111e4ddefbfaceb4ecf8da5c3d67c85f14b4d2ae7fdf23a84e6260189"
    )
    assert not set("*_\\#") & set(whole)
    assert scenes[0].startswith("Hamlet\n\nACT I\n\nSCENE I. Elsinore.")
    assert scenes[1].startswith("SCENE II. A room of state in the castle.")
    assert scenes[5].startswith("ACT II\n\nSCENE I. ")
    (speech,) = [s for s in scenes if "To be, or not to be: that is" in s]
    assert speech.startswith("ACT III\n\nSCENE I. ")
    headings = [len(re.findall(r"^SCENE [IVX]+[.:]", s, re.M)) for s in scenes]
    assert sorted(headings) == [0, 0] + [1] * 156  # two prologues


def test_the_corpus_is_what_its_readme_says():
    readme = (text._ASSETS / "README.md").read_text("utf-8")
    lines = gzip.decompress(text._CORPUS.read_bytes())
    assert hashlib.sha256(lines).hexdigest() in readme
    rows = [json.loads(line) for line in lines.decode().splitlines()]
    scene = re.search(r'^SCENE = r"(.+)"$', readme, re.M)[1]
    for title in {row["title"] for row in rows}:
        parts = [row["text"] for row in rows if row["title"] == title]
        assert parts[0].startswith(title)
        assert re.split(scene, "".join(parts), flags=re.M) == parts
    sizes = [len(text.document_ids(row["text"])) for row in rows]
    for figure in (len(sizes), sum(sizes), int(np.median(sizes))):
        assert f"{figure:,} " in readme


def test_no_asset_is_larger_than_500_kb():
    sizes = {p.name: p.stat().st_size for p in text._ASSETS.iterdir()}
    assert max(sizes.values()) < 500_000
    readme = (text._ASSETS / "README.md").read_text("utf-8")
    assert all(name in readme for name in sizes if name != "README.md")


# Token files


def test_tokens_equal_each_document_by_itself_and_eot(own_cache):
    path = text.tokenize("embedded")
    assert own_cache in path.parents
    file = text.open_tokens(path)
    tokens, starts = expected(text.corpus())
    assert file.tokens.dtype == np.uint16
    np.testing.assert_array_equal(file.tokens, tokens)
    np.testing.assert_array_equal(file.document_starts, starts)
    assert file.document_starts.dtype == np.int64
    assert (file.tokens == EOT).sum() == len(starts)
    assert (file.vocab_size, file.source) == (50257, "embedded")
    assert len(file) == len(tokens)
    assert isinstance(file.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


def test_tokenised_once(monkeypatch):
    path = text.tokenize("embedded")
    monkeypatch.setattr(
        text, "document_ids", None
    )  # would fail if it were used
    assert text.tokenize("embedded") == path
    assert text.tokenize(path) == path


def test_a_changed_source_is_tokenised_again(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("one", "utf-8")
    first = text.tokenize(source)
    source.write_text("one and two", "utf-8")
    second = text.tokenize(source)
    assert first != second
    np.testing.assert_array_equal(
        text.open_tokens(second).tokens, expected(["one and two"])[0]
    )


@pytest.mark.parametrize("limit", [1, 7, 1000, 10**9])
def test_limit(limit):
    tokens, _ = expected(text.corpus())
    file = text.open_tokens(text.tokenize("embedded", limit_tokens=limit))
    np.testing.assert_array_equal(file.tokens, tokens[:limit])
    with pytest.raises(Refusal, match="limit_tokens is 0"):
        text.tokenize("embedded", limit_tokens=0)


def test_a_limit_that_ends_a_document_starts_no_other(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n', "utf-8")
    file = text.open_tokens(text.tokenize(source, limit_tokens=2))
    assert file.tokens.tolist() == [505, EOT]
    assert file.document_starts.tolist() == [0]


def test_long_runs_of_spaces(tmp_path):
    """tiktoken aborts on them, and prints a Rust stack."""
    source = tmp_path / "spaces.txt"
    source.write_text("a" + " " * 1_000_000 + "b\n", "utf-8")
    file = text.open_tokens(text.tokenize(source))
    assert text.encoding().decode(file.tokens[:-1]) == source.read_text()


def test_a_token_file_gives_its_documents_back(tmp_path):
    path = text.tokenize("embedded")
    assert list(text.documents(path)) == text.corpus()
    short = text.tokenize("embedded", limit_tokens=100)
    (start,) = text.documents(short)
    assert text.corpus()[0].startswith(start)
    assert len(start) > 200


def test_a_token_file_pickles_as_its_path():
    file = text.open_tokens(text.tokenize("embedded"))
    packed = pickle.dumps(file)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    np.testing.assert_array_equal(again.tokens, file.tokens)


def test_two_processes_at_once(tmp_path):
    """Both tokenise, and read a file that they got by its path."""
    given = text.open_tokens(text.tokenize("embedded", limit_tokens=1000))
    out = tmp_path / "a.tokens"
    code = LIGHT + (
        f"print(text.open_tokens(text.tokenize('embedded', {str(out)!r})));"
        "given = pickle.loads(sys.stdin.buffer.read());"
        "print(int(given.tokens.astype('int64').sum()))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in both:
        process.stdin.write(pickle.dumps(given))
        process.stdin.close()
        process.stdin = None
    answers = [process.communicate()[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0] == answers[1]
    total = int(answers[0].splitlines()[1])
    assert total == int(given.tokens.astype(np.int64).sum())
    file = text.open_tokens(out)
    np.testing.assert_array_equal(file.tokens, expected(text.corpus())[0])
    assert not partials(tmp_path)


def test_a_killed_write_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    out = tmp_path / "a.tokens"
    calls = []

    def killed(document):
        calls.append(document)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return np.zeros(5, "<u2")

    monkeypatch.setattr(text, "document_ids", killed)
    with pytest.raises(KeyboardInterrupt):
        text.tokenize("embedded", out)
    assert not out.exists()
    assert not partials(tmp_path)


def test_a_process_killed_outright(tmp_path):
    out = tmp_path / "a.tokens"
    code = LIGHT + (
        "text._move = lambda *a: os._exit(9);"
        f"text.tokenize('embedded', {str(out)!r})"
    )
    process = subprocess.run([sys.executable, "-c", code], check=False)
    assert process.returncode == 9
    (left,) = partials(tmp_path)
    assert not out.exists()
    text.tokenize("embedded", out)
    assert left.exists()  # a writer may still be at it
    os.utime(left, (time.time() - 90_000,) * 2)
    text.tokenize("embedded", out, limit_tokens=10)
    assert not left.exists()
    assert len(text.open_tokens(out)) == 10


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(document):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text, "document_ids", full)
    with pytest.raises(Refusal, match="No space left on device; set BENCH_"):
        text.tokenize("embedded", tmp_path / "a.tokens")
    assert not list(tmp_path.glob("*.tokens"))
    assert not partials(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refusal, match="cannot write .*a.tokens"):
        text.tokenize("embedded", tmp_path / "file" / "a.tokens")


def test_a_read_only_cache_falls_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("no folder can be made below a file")
    monkeypatch.setattr(
        text.tempfile, "gettempdir", lambda: str(tmp_path / "temporary")
    )
    path = text.tokenize("embedded", limit_tokens=10)
    assert tmp_path / "temporary" in path.parents
    assert "cannot write to" in capsys.readouterr().err
    monkeypatch.setattr(
        text.tempfile, "gettempdir", lambda: str(tmp_path / "file")
    )
    with pytest.raises(Refusal, match="set BENCH_CACHE to a folder"):
        text.tokenize("embedded", limit_tokens=10)


def test_another_file_is_not_overwritten(tmp_path):
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(Refusal, match="exists and is no token file"):
        text.tokenize("embedded", precious)
    assert precious.read_text() == "years of work"


def test_a_damaged_cached_file_is_made_again(capsys):
    path = text.tokenize("embedded")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert text.tokenize("embedded") == path
    assert "is cut short" in capsys.readouterr().err
    assert path.read_bytes() == whole


def flipped(at, data):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = {
    "is cut short": lambda data: data[:5000],
    "has trailing bytes": lambda data: data + b"\0",
    "does not match its checksum": lambda data: flipped(6000, data),
    "does not match": lambda data: flipped(len(data) - 1, data),
    "has a damaged header": lambda data: flipped(60, data),
    "damaged header": lambda data: data[:200],
    "is not a token file": lambda data: data[4096:],
    "not a token file": lambda data: b"",
    "holds id 60000, above": lambda data: (
        data[:4096] + np.uint16(60000).tobytes() + data[4098:]
    ),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_a_damaged_file_is_named(tmp_path, sentence):
    path = text.tokenize("embedded", limit_tokens=5000)
    damaged = tmp_path / "damaged.tokens"
    damaged.write_bytes(DAMAGES[sentence](path.read_bytes()))
    with pytest.raises(Refusal, match=f"damaged.tokens.* {sentence}"):
        text.open_tokens(damaged)
    with pytest.raises(Refusal, match=f"damaged.tokens.* {sentence}"):
        text.tokenize(damaged)


def test_contents_of_a_large_file_are_checked_on_request(monkeypatch):
    path = text.tokenize("embedded", limit_tokens=5000)
    path.write_bytes(flipped(6000, path.read_bytes()))
    monkeypatch.setattr(text, "_CHECKED_BYTES", 1000)
    assert len(text.open_tokens(path)) == 5000
    with pytest.raises(Refusal, match="checksum"):
        text.open_tokens(path, check=True)


def test_a_missing_token_file_is_named(tmp_path):
    with pytest.raises(Refusal, match="cannot read .*none.tokens: No such"):
        text.open_tokens(tmp_path / "none.tokens")
    with pytest.raises(Refusal, match="cannot read"):
        text.open_tokens(tmp_path)


# Sources

TEXTS = ["First, a text.\n", "Zweitens: größer als ein Byte.", "第三"]


def write_jsonl(path, rows):
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n", "utf-8")
    assert list(text.documents(path)) == ["one\n\ntwo\n"]
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo")  # as Windows writes it
    assert list(text.documents(str(path))) == ["one\ntwo"]


def test_a_large_text_file_is_cut_at_blank_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_WHOLE", 2000)
    monkeypatch.setattr(text, "_PIECE", 300)
    whole = "\n\n".join(f"{i} " + "word " * (i % 40) for i in range(200))
    path = tmp_path / "a.txt"
    path.write_text(whole, "utf-8")
    pieces = list(text.documents(path))
    assert "".join(pieces) == whole
    assert len(pieces) > 10
    assert max(map(len, pieces)) <= 300
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    for rest in ("word\n" * 2000, "x" * 5000):  # no blank lines, no lines
        path.write_text(rest, "utf-8")
        pieces = list(text.documents(path))
        assert "".join(pieces) == rest
        assert max(map(len, pieces)) <= 300


def test_jsonl(tmp_path):
    rows = [{"id": i, "text": t} for i, t in enumerate(TEXTS)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"text": ""}])
    assert list(text.documents(path)) == TEXTS
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(text.documents(packed)) == TEXTS
    file = text.open_tokens(text.tokenize(path))
    np.testing.assert_array_equal(file.tokens, expected(TEXTS)[0])


def test_parquet(tmp_path):
    columns = {"id": [1, 2, 3, 4, 5], "text": [*TEXTS, None, ""]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    assert list(text.documents(path)) == TEXTS


def test_a_folder_is_read_in_order(tmp_path):
    (tmp_path / "deeper").mkdir()
    for name, t in zip(("b.txt", "deeper/a.txt", "a.TXT"), TEXTS, strict=True):
        (tmp_path / name).write_text(t, "utf-8")
    (tmp_path / "notes.doc").write_bytes(b"\xff")
    found = list(text.documents(tmp_path))
    assert found == [TEXTS[2], TEXTS[0], TEXTS[1]]


def make_bad(folder, name):
    path = folder / name
    rows = [{"text": t * 50} for t in TEXTS]
    if name == "cut.jsonl":
        data = write_jsonl(path, rows).read_bytes()
        path.write_bytes(data[: data.index(b"Zwei") + 20])
    elif name == "in-a-character.jsonl":
        path.write_bytes(write_jsonl(path, rows).read_bytes()[:-4])
    elif name == "field.jsonl":
        write_jsonl(path, [{"text": "a"}, {"body": "b"}])
    elif name == "list.jsonl":
        write_jsonl(path, [["text"]])
    elif name == "cut.jsonl.gz":
        data = write_jsonl(path, rows).read_bytes()
        path.write_bytes(gzip.compress(data)[:-30])
    elif name == "plain.txt.gz":
        path.write_text("never packed")
    elif name == "latin.txt":
        path.write_bytes("größer".encode("latin-1"))
    elif name == "zeros.txt":
        path.write_bytes(b"PK\0\0\0")
    elif name in ("empty.txt", "empty.jsonl"):
        path.write_text(" \n\n")
    elif name == "empty-folder":
        path.mkdir()
    elif name == "picture.png":
        path.write_bytes(b"\x89PNG")
    elif name == "cut.parquet":
        data = write_parquet(path, {"text": TEXTS}).read_bytes()
        path.write_bytes(data[:-30])
    elif name == "text.parquet":
        path.write_text("no parquet")
    elif name == "field.parquet":
        write_parquet(path, {"body": TEXTS})
    elif name == "number.parquet":
        write_parquet(path, {"text": [1, 2]})
    return path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing.txt", "does not exist"),
        ("picture.png", "of a kind that is not read here"),
        ("empty.txt", "holds no text"),
        ("empty.jsonl", "holds no text"),
        ("empty-folder", "holds no .txt"),
        ("latin.txt", "is not whole UTF-8"),
        ("in-a-character.jsonl", "is not whole UTF-8"),
        ("zeros.txt", "is not text"),
        ("cut.jsonl", "line 2, is not JSON"),
        ("field.jsonl", r"line 2, has no string \"text\" .*body"),
        ("list.jsonl", r"line 1, has no string \"text\""),
        ("cut.jsonl.gz", "is cut short"),
        ("plain.txt.gz", "cut short or not gzip"),
        ("cut.parquet", "cut short or not parquet"),
        ("text.parquet", "cut short or not parquet"),
        ("field.parquet", r"no string column \"text\" .*body"),
        ("number.parquet", "no string column"),
    ],
)
def test_a_bad_source_is_named(tmp_path, own_cache, name, sentence):
    path = make_bad(tmp_path, name)
    with pytest.raises(Refusal, match=f"{name}.*{sentence}") as refusal:
        text.tokenize(path)
    assert len(str(refusal.value).splitlines()) == 1
    assert not [p for p in own_cache.rglob("*") if p.is_file()]


def test_a_directory_without_a_permitted_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("secret")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")
    with pytest.raises(Refusal, match="cannot read .*a.txt: Permission"):
        list(text.documents(path))


# The hub

FINEWEB = "hub:HuggingFaceFW/fineweb-edu:sample-10BT"


def test_the_hub_offline_is_one_sentence_and_imports_nothing(
    monkeypatch, no_sockets
):
    monkeypatch.setitem(sys.modules, "datasets", None)  # import would raise
    with pytest.raises(Refusal, match="the hub does not answer; take 'emb"):
        next(text.documents(FINEWEB))
    assert len(no_sockets) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Refusal, match="the hub does not answer"):
        text.tokenize(FINEWEB)
    assert len(no_sockets) == 1


def test_a_name_server_that_never_answers_is_not_waited_for(monkeypatch):
    import threading

    forever = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: forever.wait())
    assert not text._online(seconds=0.05)
    forever.set()


def test_assume_online_overrules(monkeypatch):
    monkeypatch.setenv("TEXT_ASSUME_ONLINE", "1")
    assert text._online()
    monkeypatch.setenv("TEXT_ASSUME_ONLINE", "0")
    assert not text._online()


class FakeHub:
    """Stands for the datasets library; remembers what was asked."""

    def __init__(self, rows, scripted=False):
        self.rows, self.scripted, self.asked = rows, scripted, []

    def load_dataset(self, name, config, **options):
        self.asked.append((name, config, options))
        if self.scripted and "revision" not in options:
            raise RuntimeError("Dataset scripts are no longer supported")
        return iter(self.rows)


def online(monkeypatch, hub):
    monkeypatch.setenv("TEXT_ASSUME_ONLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


def test_the_hub_is_streamed_and_no_further_than_needed(monkeypatch, capsys):
    def endless():
        while True:
            yield {"text": TEXTS[0], "url": "…"}

    hub = online(monkeypatch, FakeHub(endless()))
    monkeypatch.setattr(text, "HUB_TOKENS", 100)
    file = text.open_tokens(text.tokenize(FINEWEB))
    assert len(file) == 100
    assert "the first 100 tokens" in capsys.readouterr().err
    assert hub.asked == [
        (
            "HuggingFaceFW/fineweb-edu",
            "sample-10BT",
            {"split": "train", "streaming": True},
        )
    ]
    text.tokenize(FINEWEB)
    assert len(hub.asked) == 1  # cached


def test_a_data_set_that_is_a_script_is_read_from_its_copy(monkeypatch):
    rows = [{"text": t} for t in TEXTS]
    hub = online(monkeypatch, FakeHub(rows, scripted=True))
    assert list(text.documents("hub:Skylion007/openwebtext")) == TEXTS
    name, config, options = hub.asked[1]
    assert (name, config) == ("Skylion007/openwebtext", None)
    assert options["revision"] == "refs/convert/parquet"


def test_what_the_hub_raises_becomes_one_sentence(monkeypatch):
    online(monkeypatch, FakeHub([]))
    with pytest.raises(Refusal, match="hub:a/b holds no text"):
        text.tokenize("hub:a/b")
    online(monkeypatch, FakeHub([{"content": "x"}]))
    with pytest.raises(Refusal, match='no string field "text".*content'):
        list(text.documents("hub:a/b"))

    def broken():
        yield {"text": "a"}
        raise ConnectionError("reset\nby peer")

    online(monkeypatch, FakeHub(broken()))
    with pytest.raises(Refusal, match="read: ConnectionError: reset$"):
        list(text.documents("hub:a/b"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refusal, match="pip install datasets"):
        list(text.documents("hub:a/b"))
    with pytest.raises(Refusal, match="names no data set"):
        list(text.documents("hub:"))


# The command line


def test_the_command_line(tmp_path, capsys, monkeypatch):
    out = tmp_path / "a.tokens"
    argv = ["embedded", "--out", str(out), "--limit-tokens", "50"]
    assert text.main(argv) == out
    assert "50 tokens, 1 documents" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["text", str(tmp_path / "no.txt")])
    with pytest.raises(SystemExit) as end:
        bench.run(text.main)
    assert end.value.code == 2
    assert "no.txt does not exist" in capsys.readouterr().err
