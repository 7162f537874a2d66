"""Text for GPT-2, offline: a tokenizer, a corpus, tokens read in place.

Tokenised once, a text is an array of 2-byte ids in a file which the system
maps into memory: a window of it costs the pages it touches, is shared by all
loader workers, and survives a fork or a spawn as a path.

Run     python -m common.text SOURCE [--out FILE] [--limit-tokens N]
Sources "embedded" (Shakespeare, public domain); a .txt, .jsonl or .parquet
        file (the last two with a "text" field; .gz for the first two) or a
        folder of them; "hub:NAME[:CONFIG]", the only one that downloads:
        hub:HuggingFaceFW/fineweb-edu:sample-10BT (FineWeb-Edu),
        hub:Skylion007/openwebtext (OpenWebText, which GPT-2 repeats).
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

from common.bench import Refusal

if TYPE_CHECKING:
    import tiktoken

EOT = 50256  # GPT-2's end of text, put after every document
VOCAB_SIZE = 50257
HUB_TOKENS = 10_000_000  # what is streamed when no limit is given

_ASSETS = Path(__file__).parent / "assets"
_CORPUS = _ASSETS / "shakespeare.jsonl.gz"
_RANKS_SHA256 = (  # tiktoken's own check of the same table
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
)
_KINDS = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_WHOLE = 16 << 20  # a larger .txt is cut into several documents
_PIECE = 1 << 20  # characters of such a document, about

_MAGIC = "gpt2-tokens"
_HEADER_BYTES = 4096  # one block, so that the ids begin on a page
_CHECKED_BYTES = 64 << 20  # files up to this size are hashed when opened


@functools.cache
def encoding() -> "tiktoken.Encoding":
    """Return tiktoken's GPT-2 encoding, built from the embedded ranks.

    ``tiktoken.get_encoding("gpt2")`` gives the same ids but downloads two
    files on its first use, without a timeout.

    Raises:
        Refusal: if tiktoken is missing or the embedded table is damaged.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise Refusal(
            "the GPT-2 tokenizer needs tiktoken: pip install tiktoken"
        ) from error
    path = _ASSETS / "gpt2.tiktoken.gz"
    table = _asset(path)
    if hashlib.sha256(table).hexdigest() != _RANKS_SHA256:
        raise Refusal(f"{path} is damaged: restore it from the repository")
    ranks = {}
    for line in table.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=(  # Radford et al. 2019, encoder.py
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|"
            r" ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        ),
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": EOT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def corpus() -> list[str]:
    """Return the embedded corpus: nine plays, a document per scene, 1.0 MB.

    Public domain; ``assets/README.md`` says where it comes from.
    """
    lines = _asset(_CORPUS).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def documents(source: str | Path) -> Iterator[str]:
    """Yield the documents of a source one by one, without loading it all.

    A .txt of up to 16 MiB is one document; a larger one is cut at blank
    lines into documents of about a million characters, so that no text has to
    fit in memory.  A folder yields its files in the order of their names, a
    token file its documents decoded.

    Args:
        source: "embedded", a path, or "hub:NAME[:CONFIG]" (downloads).

    Raises:
        Refusal: no such file, unknown kind, empty, cut short, not UTF-8, no
            "text" field, or a hub name without a network.
    """
    source = str(source)
    if source == "embedded":
        texts = corpus()
    elif source.startswith("hub:"):
        texts = _hub(source)
    elif _is_token_file(source):
        texts = _decoded(open_tokens(source))
    else:
        texts = (t for path in _files(Path(source)) for t in _read(path))
    empty = True
    for text in texts:
        empty = False
        yield text
    if empty:
        raise Refusal(f"{source} holds no text")


def document_ids(document: str) -> np.ndarray:
    """Return a document's ids and the end of text after them, uint16.

    tiktoken aborts on some 100,000 spaces in a row (its pattern overflows
    the stack), which web pages do hold: such runs are cut.
    """
    encode, ids, at = encoding().encode_ordinary, [], 0
    for run in re.finditer(r"\s{10000}", document):
        ids += encode(document[at : run.end()])
        at = run.end()
    return np.array([*ids, *encode(document[at:]), EOT], dtype="<u2")


def tokenize(
    source: str | Path,
    out: str | Path | None = None,
    limit_tokens: int | None = None,
) -> Path:
    """Tokenise a source once into a file, or find that it has been done.

    The ids go to disk as they come; the file gets its name when it is whole.
    Two processes may do it at once: both write the same bytes.

    Args:
        source: as for ``documents``, or a token file (returned as it is).
        out: the file to write; by default one in the cache folder, named
            after the source and its size and date (contents if embedded,
            name alone for the hub).
        limit_tokens: stop after so many ids, in mid-document if need be.

    Raises:
        Refusal: as ``documents``; if the file cannot be written.
    """
    if limit_tokens is not None and limit_tokens < 1:
        raise Refusal(f"limit_tokens is {limit_tokens}: give 1 or more")
    source = str(source)
    if _is_token_file(source):
        return open_tokens(source).path
    if source.startswith("hub:") and limit_tokens is None:
        limit_tokens = HUB_TOKENS
        _say(f"{source}: taking the first {HUB_TOKENS:,} tokens")
    key = _key(source, limit_tokens)
    if out is None:
        stem = "".join(c if c.isalnum() else "-" for c in source)[-40:]
        out = _writable_cache() / f"{stem.strip('-')}-{key[:12]}.tokens"
    out = Path(out)
    if _holds(out, key):
        return out
    return _write(out, source, limit_tokens, key)


class TokenFile:
    """Token ids in a file, read in place; made by ``open_tokens``.

    Pickles as its path, so that a spawned worker maps the file again
    instead of receiving its contents.

    Attributes:
        path: the file.
        tokens: ids, read-only ``np.memmap`` of uint16, (N,).
        document_starts: where each document begins, int64, (documents,).
        vocab_size: all ids are below it.
        source: what was tokenised, in words.
        digest: SHA-256 of ids and starts.
    """

    def __init__(self, path: Path, header: dict):
        count, documents = header["tokens"], header["documents"]
        self.path, self.header = path, header
        self.vocab_size, self.source = header["vocab_size"], header["source"]
        self.digest = header["sha256"]
        self.tokens = np.memmap(path, "<u2", "r", _HEADER_BYTES, (count,))
        self.document_starts = np.memmap(
            path, "<i8", "r", _HEADER_BYTES + _padded(2 * count), (documents,)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self):
        return open_tokens, (str(self.path), False)

    def __repr__(self) -> str:
        return (
            f"TokenFile({str(self.path)!r}, {len(self.tokens):,} tokens, "
            f"{len(self.document_starts):,} documents)"
        )


def open_tokens(path: str | Path, check: bool | None = None) -> TokenFile:
    """Map a token file into memory, after checking that it is one.

    Header, its checksum and the file's exact size are always checked.

    Args:
        path: a file that ``tokenize`` wrote.
        check: also hash the contents and compare every id with the
            vocabulary; by default only up to 64 MiB.

    Raises:
        Refusal: not a token file, cut short, trailing bytes, damaged.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            block = file.read(_HEADER_BYTES)
    except OSError as error:
        raise Refusal(
            f"cannot read {path}: {error.strerror or error}"
        ) from error
    if not block.startswith(b'{"magic": "' + _MAGIC.encode()):
        raise Refusal(
            f"{path} is not a token file of this project; make one with "
            "python -m common.text SOURCE --out FILE"
        )

    def damaged(what):
        return Refusal(f"{path} {what}: delete it and tokenise again")

    header = _parse_header(block)
    if header is None:
        raise damaged("has a damaged header")
    if header["version"] != 1 or header["dtype"] != "<u2":
        raise damaged("is of another version")
    ids_end = _HEADER_BYTES + 2 * header["tokens"]
    starts_at = _HEADER_BYTES + _padded(2 * header["tokens"])
    whole = starts_at + 8 * header["documents"]
    if size != whole:
        what = "is cut short" if size < whole else "has trailing bytes"
        raise damaged(f"{what} ({size:,} of {whole:,} bytes)")
    opened = TokenFile(path, header)
    if check if check is not None else size <= _CHECKED_BYTES:
        digest = hashlib.sha256()
        highest = 0
        for at in range(0, len(opened), 1 << 22):
            ids = opened.tokens[at : at + (1 << 22)]
            digest.update(ids.tobytes())
            highest = max(highest, int(ids.max()))
        digest.update(bytes(starts_at - ids_end))
        digest.update(opened.document_starts.tobytes())
        if highest >= opened.vocab_size:
            raise damaged(
                f"holds id {highest}, above its vocabulary of "
                f"{opened.vocab_size}"
            )
        if digest.hexdigest() != header["sha256"]:
            raise damaged("does not match its checksum")
    return opened


def _asset(path: Path) -> bytes:
    """Return an embedded file's contents."""
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise Refusal(
            f"{path} is missing or damaged: restore it from the repository"
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _files(path: Path) -> list[Path]:
    """Return the files a path stands for, in order."""
    if path.is_dir():
        found = sorted(
            file
            for file in path.rglob("*")
            if file.name.lower().endswith(_KINDS) and file.is_file()
        )
        if not found:
            raise Refusal(f"{path} holds no {', '.join(_KINDS)} file")
        return found
    if not path.exists():
        raise Refusal(
            f"{path} does not exist; a source is 'embedded', a file or "
            "folder, or hub:NAME"
        )
    if not path.name.lower().endswith(_KINDS):
        raise Refusal(
            f"{path} is of a kind that is not read here; known: "
            f"{', '.join(_KINDS)}, a folder of these, or a token file"
        )
    return [path]


def _read(path: Path) -> Iterator[str]:
    """Yield the documents of one file."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _parquet(path)
        return
    split = _jsonl if ".jsonl" in name else _plain
    opener = gzip.open if name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield from split(path, file)
    except UnicodeDecodeError as error:
        raise Refusal(
            f"{path} is not whole UTF-8 text ({error.reason}): convert it, "
            "or fetch it again"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Refusal(f"{path} is cut short or not gzip: {error}") from error
    except OSError as error:
        raise Refusal(
            f"cannot read {path}: {error.strerror or error}"
        ) from error


def _plain(path: Path, file: TextIO) -> Iterator[str]:
    """Yield a text whole, or a long one in pieces cut at blank lines."""
    text = file.read(_WHOLE)
    if "\0" in text:
        raise Refusal(f"{path} is not text: it holds zero bytes")
    if len(text) < _WHOLE:
        if text.strip():
            yield text
        return
    rest = text
    while True:
        while len(rest) > _PIECE:
            cut = rest.rfind("\n\n", 0, _PIECE) + 2
            if cut < 2:  # no blank line: a line's end, else anywhere
                cut = rest.rfind("\n", 0, _PIECE) + 1 or _PIECE
            yield rest[:cut]
            rest = rest[cut:]
        more = file.read(_PIECE)
        if not more:
            break
        rest += more
    if rest.strip():
        yield rest


def _jsonl(path: Path, file: TextIO) -> Iterator[str]:
    """Yield the "text" of each line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refusal(
                f"{path}, line {number}, is not JSON: cut short, or of "
                "another kind"
            ) from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            fields = sorted(row) if isinstance(row, dict) else "none"
            raise Refusal(
                f'{path}, line {number}, has no string "text" (fields: '
                f"{fields}); rename the field"
            )
        if text:
            yield text


def _parquet(path: Path) -> Iterator[str]:
    """Yield the "text" column, a batch of rows at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise Refusal(
            f"reading {path} needs pyarrow: pip install datasets"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            kind = schema.field("text").type if "text" in schema.names else ""
            if str(kind) not in ("string", "large_string", "string_view"):
                raise Refusal(
                    f'{path} has no string column "text" (columns: '
                    f"{schema.names}); rename the column"
                )
            for batch in file.iter_batches(256, columns=["text"]):
                yield from filter(None, batch.column(0).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(
            f"{path} is cut short or not parquet: {_first_line(error)}"
        ) from error


def _decoded(file: TokenFile) -> Iterator[str]:
    """Yield the documents of a token file as text again."""
    ends = [*file.document_starts[1:], len(file)]
    for start, end in zip(file.document_starts, ends, strict=True):
        ids = file.tokens[start:end]
        cut = end - start - 1 if ids[-1] == EOT else end - start
        yield encoding().decode(ids[:cut].tolist())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _online(seconds: float = 2.0) -> bool:
    """Tell within two seconds whether the hub answers.

    In a thread, because looking up a name has no timeout of its own.
    ``TEXT_ASSUME_ONLINE=1`` overrules the answer (behind a proxy).
    """
    if os.environ.get("TEXT_ASSUME_ONLINE", "0") not in ("", "0"):
        return True
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "TRUE"):
        return False
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    scheme, _, rest = url.partition("://")
    host, _, port = rest.split("/")[0].partition(":")
    address = (host, int(port or (80 if scheme == "http" else 443)))
    answers = []

    def knock():
        try:
            socket.create_connection(address, timeout=seconds).close()
            answers.append(True)
        except Exception:  # also what a sandbox raises instead of OSError
            answers.append(False)

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]


def _hub(source: str) -> Iterator[str]:
    """Stream the "text" of a Hugging Face data set's training split."""
    name, _, config = source.removeprefix("hub:").partition(":")
    if not name:
        raise Refusal(f"{source!r} names no data set: hub:NAME[:CONFIG]")
    if not _online():
        raise Refusal(
            f"{source} needs a network and the hub does not answer; take "
            "'embedded' or a local file, or set TEXT_ASSUME_ONLINE=1 if "
            "you are behind a proxy"
        )
    try:
        import datasets
    except ImportError as error:
        raise Refusal(f"{source} needs: pip install datasets") from error
    load = functools.partial(
        datasets.load_dataset,
        name,
        config or None,
        split="train",
        streaming=True,
    )
    try:
        try:
            rows = load()
        except RuntimeError as error:
            if "scripts" not in str(error):
                raise
            # older data sets are a script, which datasets 4 no longer runs;
            # the hub keeps a converted copy of them on this branch
            rows = load(revision="refs/convert/parquet")
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise Refusal(
                    f'{source} has no string field "text" (fields: '
                    f"{sorted(row)}); choose another config or data set"
                )
            if row["text"]:
                yield row["text"]
    except (Refusal, GeneratorExit):
        raise
    except Exception as error:  # the library's kinds of error are many
        raise Refusal(
            f"{source} could not be read: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


def _key(source: str, limit_tokens: int | None) -> str:
    """Return a hash of what a token file's contents depend on."""
    facts = [_MAGIC, 1, limit_tokens]
    if source == "embedded":
        facts.append(hashlib.sha256(_CORPUS.read_bytes()).hexdigest())
    elif source.startswith("hub:"):
        facts.append(source)
    else:
        for path in _files(Path(source)):
            stat = path.stat()
            facts += [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _writable_cache() -> Path:
    """Return the cache folder's place for tokens, else a temporary one."""
    from common import machine

    user = getattr(os, "getuid", lambda: "user")()
    choices = (
        Path(machine.cache_dir()) / "tokens",
        Path(tempfile.gettempdir()) / f"pytorch-performance-{user}" / "tokens",
    )
    for last, folder in enumerate(choices):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = f"cannot write to {folder}: {error.strerror or error}"
            if last:
                break
            _say(f"{reason}; using {choices[1]}")
        else:
            return folder
    raise Refusal(f"{reason}; set BENCH_CACHE to a folder with room")


def _is_token_file(source: str) -> bool:
    """Tell whether a source is a token file already."""
    if source == "embedded" or source.startswith("hub:"):
        return False
    if source.endswith(".tokens"):
        return True
    try:
        with open(source, "rb") as file:
            return _MAGIC.encode() in file.read(32)
    except OSError:
        return False


def _holds(out: Path, key: str) -> bool:
    """Tell whether a file holds the wanted tokens already.

    Raises:
        Refusal: if the file is there and is no token file, since writing
            would destroy it.
    """
    if not out.exists():
        return False
    if not _is_token_file(str(out)) and out.stat().st_size:
        raise Refusal(f"{out} exists and is no token file; name another")
    try:
        return open_tokens(out).header["key"] == key
    except Refusal as error:
        _say(str(error).replace("delete it and tokenise", "tokenising"))
        return False


def _padded(size: int) -> int:
    """Round up to a multiple of 8 bytes, where int64 may begin."""
    return -(-size // 8) * 8


def _header_block(header: dict) -> bytes:
    """Return the header as one padded line that ends with its checksum."""
    text = json.dumps(header)
    line = f"{text} {zlib.crc32(text.encode()):08x}"
    return (line.ljust(_HEADER_BYTES - 1) + "\n").encode()


def _parse_header(block: bytes) -> dict | None:
    """Return the header, or None where it does not match its checksum."""
    try:
        text, _, crc = block.decode("ascii").rstrip().rpartition(" ")
        return (
            json.loads(text)
            if zlib.crc32(text.encode()) == int(crc, 16)
            else None
        )
    except ValueError:
        return None


def _write(out: Path, source: str, limit: int | None, key: str) -> Path:
    """Tokenise into a file beside ``out`` and rename it when it is whole."""
    digest, starts, count = hashlib.sha256(), array("q"), 0
    writer = f"{os.getpid()}-{threading.get_ident()}"
    partial = out.with_name(f".{out.name}.{writer}.partial")
    texts = documents(source)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        with open(partial, "wb") as file:
            file.write(bytes(_HEADER_BYTES))
            for text in texts:
                starts.append(count)
                ids = document_ids(text)[
                    : None if limit is None else limit - count
                ]
                count += len(ids)
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
                if count == limit:
                    break
            gap = bytes(_padded(2 * count) - 2 * count)
            tail = gap + np.array(starts, dtype="<i8").tobytes()
            file.write(tail)
            digest.update(tail)
            header = {
                "magic": _MAGIC,
                "version": 1,
                "dtype": "<u2",
                "vocab_size": VOCAB_SIZE,
                "tokens": count,
                "documents": len(starts),
                "source": source[-1000:],
                "key": key,
                "sha256": digest.hexdigest(),
            }
            file.seek(0)
            file.write(_header_block(header))
        _move(partial, out, key)
    except OSError as error:
        raise Refusal(
            f"cannot write {out}: {error.strerror or error}; set "
            "BENCH_CACHE or name a file in a folder with room"
        ) from error
    finally:
        texts.close()
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return out


def _move(partial: Path, out: Path, key: str) -> None:
    """Give the file its name.

    Windows refuses while another process has the old one mapped; where that
    one holds the same tokens, nothing is lost.
    """
    try:
        os.replace(partial, out)
    except PermissionError:
        if not _holds(out, key):
            raise


def _sweep(out: Path) -> None:
    """Remove what killed writers left beside ``out`` over a day ago."""
    for left in out.parent.glob(f".{out.name}.*.partial"):
        if time.time() - left.stat().st_mtime > 86400:
            left.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> Path:
    """Tokenise a source from the command line and say what came of it."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m common.text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="embedded, a path, or hub:NAME")
    parser.add_argument("--out", help="the token file (default: cached)")
    parser.add_argument("--limit-tokens", type=int)
    args = parser.parse_args(argv)
    path = tokenize(args.source, args.out, args.limit_tokens)
    print(open_tokens(path))
    return path


if __name__ == "__main__":
    from common import bench

    bench.run(main)
