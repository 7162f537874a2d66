"""A trace is one long JSON list of timed events: read in a single pass.

``read`` takes what ``torch.profiler`` and Kineto write today and wrote
before (.json, .json.gz, a .tar of ranks, a folder of any of these), keeps
seven numbers of each event in columns and forgets the rest, so that memory
follows the number of events and not the size of the file.
"""

import codecs
import io
import json
import re
import tarfile
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path, PurePosixPath

import numpy as np

from ch04_profiling import event_names as names
from common import bench

CHUNK = 1 << 22  # bytes of JSON that are looked at together
LARGEST_VALUE = 64 << 20  # characters of one event or header field
LARGEST_TRACE = 8 << 30  # bytes of JSON of one trace, unpacked
LARGEST_COUNT = 20_000_000  # events kept of one trace: about 1 GB
BOMB_BYTES, BOMB_RATIO = 64 << 20, 300  # traces pack 8 to 40 times
LONGEST_US = 86_400e6  # of one recording: what lies further off is a fault
LONG_FRAME_US = 500.0  # a Python frame whose name can explain a gap
SHRINK = (
    "record fewer steps (torch.profiler.schedule(wait=…, warmup=…, "
    "active=3)), without with_stack and profile_memory"
)
SUFFIXES = (".json", ".json.gz", ".gz", ".tar", ".tgz")
LONGEST_NAME = 2000  # characters of an event's name that are looked at
MOST_CATEGORIES = 100  # that are counted
BATCHED = {"aten::conv2d", "aten::embedding", "aten::linear", "aten::conv1d"}


@dataclass
class Trace:
    """The events of one rank in columns; times are ns after the first one.

    start, end, kind, name, lane, correlation and bytes have one entry per
    event; ``name`` and ``lane`` are positions in ``names`` and ``lanes``
    (pairs of process and thread or stream), -1 stands for "not recorded".
    """

    label: str
    header: dict
    rank: int | None
    world: int | None
    names: list
    lanes: list
    columns: dict
    window: tuple  # first and last ns of any host or GPU event
    base_us: float  # of time 0, on the recorder's clock
    warnings: list = field(default_factory=list)
    batch: int | None = None  # first dimension of the first layers' inputs
    frames: list = field(default_factory=list)  # long ones of Python

    def __getattr__(self, name):
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def warn(self, kind, text):
        self.warnings.append({"kind": kind, "text": text})


# ---- bytes to text -------------------------------------------------------


class _Unpacked(io.RawIOBase):
    """A gzip stream: never more than asked for, and not without end."""

    def __init__(self, file, label):
        self.file, self.label = file, label
        self.unpacker = zlib.decompressobj(31)
        self.packed, self.count, self.used = b"", 0, 0

    def readable(self):
        return True

    def read(self, size=-1):
        """Return up to ``size`` bytes, b"" at the end.

        Raises:
            EOFError, zlib.error: cut short or damaged here.
        """
        size = CHUNK if size < 0 else size
        while True:
            if not self.packed:
                self.packed = self.file.read(1 << 16)
                self.used += len(self.packed)
                if not self.packed:
                    if self.unpacker.eof:
                        return b""
                    raise EOFError("cut short")
            if self.unpacker.eof:  # another member, or padding
                if not self.packed.strip(b"\0"):
                    self.packed = b""
                    continue
                self.unpacker = zlib.decompressobj(31)
            data = self.unpacker.decompress(self.packed, size)
            self.packed = (
                self.unpacker.unconsumed_tail or self.unpacker.unused_data
            )
            if data:
                break
        self.count += len(data)
        used = max(self.used - len(self.packed), 1)
        if self.count > BOMB_BYTES and self.count / used > BOMB_RATIO:
            raise bench.Refusal(
                f"{self.label}: unpacks to more than {BOMB_RATIO} times its "
                "size, which no trace does; it is damaged or a trap"
            )
        return data


class _Text:
    """A window over the text of a file, moved on as values are read."""

    def __init__(self, file, label):
        self.file, self.label = file, label
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.scan = json.JSONDecoder(strict=False).scan_once
        self.text, self.at, self.read_bytes = "", 0, 0
        self.ended, self.cut = False, False

    def more(self):
        """Append a chunk; return whether there was one."""
        if self.ended:
            return False
        pieces, size = [], 0
        try:
            while size < CHUNK and (piece := self.file.read(CHUNK - size)):
                pieces.append(piece)
                size += len(piece)
        except (EOFError, OSError, zlib.error):  # cut short, or damaged
            self.cut = True
        data = b"".join(pieces)
        self.read_bytes += len(data)
        if self.read_bytes > LARGEST_TRACE:
            raise bench.Refusal(
                f"{self.label}: more than {LARGEST_TRACE >> 30} GiB of JSON; "
                + SHRINK
            )
        self.ended = not data
        text = self.decoder.decode(data, final=self.ended)
        if self.read_bytes == len(data):
            text = text.removeprefix("\ufeff")
        self.text = self.text[self.at :] + text
        self.at = 0
        return bool(data)

    def peek(self):
        """Return the next character that is no space, "" at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self):
        """Read one JSON value.

        Raises:
            StopIteration: the text ends inside it.
            ValueError: it is not JSON.
        """
        while True:
            try:
                value, end = self.scan(self.text, self.at)
                if end < len(self.text) or not self.more():
                    self.at = end
                    return value
            except StopIteration as stop:
                here = stop.value - self.at
                if len(self.text) - self.at - here > 16:
                    raise ValueError("not JSON") from None
                if not self.more():
                    raise
            except json.JSONDecodeError as error:
                # a fault, unless it is the end of what was read so far
                open_string = error.msg.startswith("Unterminated")
                if not open_string and len(self.text) - error.pos > 16:
                    raise
                if len(self.text) - self.at > LARGEST_VALUE:
                    raise
                if not self.more():
                    raise StopIteration from None
            except RecursionError:
                raise bench.Refusal(
                    f"{self.label}: values nested without end; not a trace"
                ) from None


_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_NEXT_EVENT = re.compile(r"\{\s*\"(ph|name|cat|ts|pid|args)\"\s*:")


def _events(text, damaged):
    """Yield the values of the list that ``text`` stands in, one by one.

    A value that is not JSON is left out, its text counted in ``damaged``,
    and reading goes on where the next event seems to begin.
    """
    scan = text.scan
    buffer, at = text.text, text.at
    while True:
        at = _BETWEEN.match(buffer, at).end()
        if len(buffer) - at > CHUNK // 4 or text.ended:
            # far from the window's end: the quick way
            try:
                value, at = scan(buffer, at)
                yield value
                continue
            except (StopIteration, ValueError, RecursionError):
                pass
        text.at = at
        first = text.peek()
        if first in ("]", ""):
            text.cut |= first == ""
            text.at += 1
            return
        try:
            value = text.value()
        except StopIteration:
            text.cut = True
            return
        except ValueError:
            damaged.append(1)
            if not _resume(text):
                text.cut = True
                return
            buffer, at = text.text, text.at
            continue
        buffer, at = text.text, text.at
        yield value


def _resume(text):
    """Move to where the next event seems to begin; False at the end."""
    text.at += 1
    while True:
        found = _NEXT_EVENT.search(text.text, text.at)
        if found:
            text.at = found.start()
            return True
        text.at = max(text.at, len(text.text) - 64)
        if not text.more():
            return False


# ---- events to columns ---------------------------------------------------

_INDEX = ("Ev Idx", "Profiler Event Index")
_LEGACY = {"CPU functions": "cpu_op", "CUDA functions": "kernel"}


class _Columns:
    """What is kept of the events, while they pass."""

    def __init__(self):
        self.start, self.length = array("d"), array("d")
        self.kind = array("b")
        self.name, self.lane = array("l"), array("l")
        self.correlation, self.bytes = array("q"), array("q")
        self.known, self.names, self.lanes = {}, [], {}
        self.base = None
        self.wide = [float("inf"), float("-inf")]  # of Python's frames
        self.frames = []  # of the long ones: start, length, name, lane
        self.window_end = None
        self.count = self.bad = self.indices = 0
        self.lowest, self.highest = float("inf"), -1
        self.batches, self.open = Counter(), {}
        self.unknown = {}  # category: events, of those that are not kept
        self.rates = []  # recorded GB/s against bytes and dur: the unit

    def add(self, event):
        """Take one event; what cannot be one is counted as bad."""
        try:
            phase = event["ph"]
            if phase == "X":
                self._take(event, event["ts"], event["dur"])
            elif phase == "B":
                key = event.get("pid"), event.get("tid")
                self.open.setdefault(key, []).append(event)
            elif phase == "E":
                key = event.get("pid"), event.get("tid")
                begun = self.open[key].pop()
                self._take(begun, begun["ts"], event["ts"] - begun["ts"])
            elif phase == "i":
                if str(event["name"]).startswith("Record Window End"):
                    self.window_end = float(event["ts"])
                elif "args" in event:
                    self._index(event["args"])
        except (TypeError, ValueError, KeyError, AttributeError):
            self.bad += 1
        except (OverflowError, IndexError):
            self.bad += 1

    def _take(self, event, start, length):
        if type(start) is str or type(length) is str:
            start, length = float(start), float(length)
        if length is None:
            length = 0.0
        key = event.get("cat"), event["name"]
        known = self.known.get(key)
        if known is None:
            known = self._introduce(key, event.get("pid"))
        kind, name = known
        if kind < 0:
            if name in self.unknown:
                self.unknown[name] += 1
            return
        if not length >= 0 or length > LONGEST_US * 1e3:
            raise ValueError("a length that cannot be")
        if self.base is None:
            self.base = start
        self.count += 1
        arguments = event.get("args") or {}
        if name < 0:  # a Python frame: of a short one when it was, not what
            start -= self.base
            if length >= LONG_FRAME_US * (1e3 if self.base > 1e17 else 1):
                lane = str(event.get("pid")), str(event.get("tid"))
                self.frames.append((start, length, key[1], lane))
            if start < self.wide[0]:
                self.wide[0] = start
            if start + length > self.wide[1]:
                self.wide[1] = start + length
            self._index(arguments)
            return
        correlation = size = -1
        if kind <= names.RUNTIME:
            correlation = arguments.get("correlation", -1)
            if kind == names.GPU and "bytes" in arguments:
                size = arguments["bytes"]
                rate = arguments.get("memory bandwidth (GB/s)")
                if rate and length and size and len(self.rates) < 200:
                    self.rates.append(float(size) / rate / 1e3 / length)
        else:
            self._index(arguments)
            if key[1] in BATCHED and "Input Dims" in arguments:
                self.batches[key[1], arguments["Input Dims"][0][0]] += 1
        lane = event.get("pid"), event.get("tid")
        at = self.lanes.get(lane)
        if at is None:
            at = self.lanes[lane] = len(self.lanes)
        start, length = float(start - self.base), float(length)
        # all of a row or nothing: nothing below can fail
        self.correlation.append(_known(correlation))
        self.bytes.append(_known(size))
        self.start.append(start)
        self.length.append(length)
        self.kind.append(kind)
        self.name.append(name)
        self.lane.append(at)

    def _introduce(self, key, process):
        """Decide once what events of this category and name are."""
        category, name = key
        if not isinstance(name, str):
            raise TypeError("a name that is none")
        if category is None:
            category = _LEGACY.get(process, "")
        category = str(category).lower()
        kind = names.kind_of(category)
        place = -1
        if kind < 0 and category not in names.PASSED_OVER:
            if len(self.unknown) < MOST_CATEGORIES:
                self.unknown.setdefault(category, 0)
            self.known[key] = kind, category
            return kind, category
        if kind == names.PYTHON:
            short = name[:LONGEST_NAME]
            if names.host_meaning(kind, short) != names.NOTHING:
                place = len(self.names)
        elif kind >= 0:
            place = len(self.names)
        if place >= 0:
            self.names.append(name[:LONGEST_NAME])
        self.known[key] = kind, place
        return kind, place

    def _index(self, arguments):
        for name in _INDEX:
            if name in arguments:
                index = int(arguments[name])
                self.indices += 1
                self.lowest = min(self.lowest, index)
                self.highest = max(self.highest, index)
                return


def _known(value):
    """Return a count as it is, -1 where it is none."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 62 else -1


def _as_float(number):
    try:
        return float(number)
    except OverflowError:
        raise bench.Refusal(
            "the times in this trace are beyond any clock: it is no "
            "recording of torch.profiler"
        ) from None


def _nanosecond_clock(columns):
    """Say whether the times are ns: no header says so, the numbers do.

    ``displayTimeUnit`` is only what a viewer should show.  Chrome's format
    is in µs, as a rule; some writers left ns in it.
    """
    if columns.rates:
        middle = sorted(columns.rates)[len(columns.rates) // 2]
        # GB/s = bytes / µs / 1000: 1 when µs, 1/1000 when ns
        return middle < 0.03
    return isinstance(columns.base, (int, float)) and columns.base > 1e17


_RANK_IN_NAME = [
    re.compile(r"rank[\W_]*(\d+)", re.IGNORECASE),
    re.compile(r"worker[\W_]*(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])(?:r|gpu|proc(?:ess)?|device)[_-]?(\d+)(?!\d)"),
    re.compile(r"^(\d{1,5})(?:\.|$)"),
]


def rank_of_name(label):
    """Return the rank that a file's name gives, or None."""
    name = PurePosixPath(label.replace("\\", "/")).name.lower()
    for pattern in _RANK_IN_NAME:
        if found := pattern.search(name):
            return int(found[1])
    return None


def _whole(value):
    """Return a count from a header, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        value = int(value)
    except ValueError:
        return None
    return value if 0 <= value < 1 << 31 else None


def parse(file, label):
    """Read one trace from a binary file.

    Raises:
        Refusal: it is no trace, or one too large to read.
    """
    text, columns = _Text(file, label), _Columns()
    header, damaged = {}, []
    _walk(text, header, columns, damaged)
    if columns.base is None or not len(columns.start):
        raise bench.Refusal(
            f"{label}: no timed events in it; is it a trace of "
            "torch.profiler (export_chrome_trace)?"
        )
    return _finish(text, columns, header, damaged, label)


def _walk(text, header, columns, damaged):
    first = text.peek()
    if first == "[":
        text.at += 1
        _gather(text, columns, damaged)
        return
    if first != "{":
        what = "is empty" if not first else _what_else(text)
        if text.cut:
            what = "is damaged and cannot be unpacked"
        raise bench.Refusal(f"{text.label}: {what}, so not a trace")
    text.at += 1
    try:
        while (following := text.peek()) not in ("}", ""):
            if following == ",":
                text.at += 1
                continue
            key = text.value()
            if text.peek() != ":":
                raise ValueError("no colon")
            text.at += 1
            if key == "traceEvents" and text.peek() == "[":
                text.at += 1
                _gather(text, columns, damaged)
            else:
                text.peek()
                value = text.value()
                if isinstance(key, str) and len(header) < 1000:
                    header[key] = value
        text.cut |= following == ""
    except StopIteration:
        text.cut = True
    except ValueError:
        if columns.base is None:
            raise bench.Refusal(
                f"{text.label}: is not JSON, so not a trace"
            ) from None
        damaged.append(1)


def _what_else(text):
    """Say what a text is that begins neither an object nor a list."""
    try:
        text.value()
        alone = not text.peek()
    except (StopIteration, ValueError):
        alone = False
    return "is one value of JSON" if alone else "is not JSON"


def _gather(text, columns, damaged):
    add, events = columns.add, _events(text, damaged)
    begun = list(islice(events, 64))
    if columns.base is None:
        columns.base = _middle_time(begun)
    for event in chain(begun, events):
        add(event)
        if columns.count > LARGEST_COUNT:
            raise bench.Refusal(
                f"{text.label}: more than {LARGEST_COUNT:,} events; {SHRINK}"
            )


def _middle_time(events):
    """Return the median time of some events: one may be wild.

    Later times are taken relative to it, before they become floats.
    """
    times = []
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            time = event.get("ts")
            if type(time) in (int, float) and abs(time) < 1e30:
                times.append(time)
    return sorted(times)[len(times) // 2] if times else None


def _finish(text, columns, header, damaged, label):
    """Turn what was gathered into a Trace: ns, sorted, clipped."""
    start = np.frombuffer(columns.start, np.float64)
    length = np.frombuffer(columns.length, np.float64)
    divisor = 1e3 if _nanosecond_clock(columns) else 1.0
    start, length = start / divisor, length / divisor
    middle = np.median(start[np.isfinite(start)])
    keep = np.abs(start - middle) < LONGEST_US  # False for NaN, too
    keep &= length < LONGEST_US
    bad = columns.bad + int((~keep).sum()) + len(damaged)
    if not keep.any():
        raise bench.Refusal(f"{label}: no event in it has a usable time")
    low = start[keep].min()
    high = (start + length)[keep].max()
    limit = np.inf
    if columns.window_end is not None:
        limit = (columns.window_end - columns.base) / divisor
        kinds = np.frombuffer(columns.kind, np.int8)
        gpu = keep & (kinds == names.GPU)
        # the recorder's own mark, unless it contradicts the GPU's events
        if gpu.any() and limit < (start + length)[gpu].max():
            limit = np.inf
        if not limit > low:
            limit = np.inf
    wide = [w / divisor for w in columns.wide]
    if abs(wide[0] - middle) < LONGEST_US and wide[1] - low < LONGEST_US:
        low, high = min(low, wide[0]), max(high, wide[1])
    high = min(high, limit)

    def ns(us):
        return np.rint((us - low) * 1e3).astype(np.int64)

    starts = ns(start[keep])
    ends = np.minimum(ns((start + length)[keep]), ns(np.float64(high)))
    order = np.argsort(starts, kind="stable")
    kept = {
        name: np.frombuffer(getattr(columns, name), dtype)[keep][order]
        for name, dtype in (
            ("kind", np.int8),
            ("name", f"i{columns.name.itemsize}"),
            ("lane", f"i{columns.lane.itemsize}"),
            ("correlation", np.int64),
            ("bytes", np.int64),
        )
    }
    kept |= {
        "start": starts[order],
        "end": np.maximum(ends[order], starts[order]),
    }
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = _whole(info.get("rank"))
    lanes = [(str(one), str(two)) for one, two in columns.lanes]
    trace = Trace(
        label=label,
        header=header,
        rank=rank_of_name(label) if rank is None else rank,
        world=_whole(info.get("world_size")),
        names=columns.names,
        lanes=lanes,
        columns=kept,
        window=(0, int(ns(np.float64(high)))),
        base_us=_as_float(columns.base) / divisor + float(low),
        frames=[
            (int(ns(begin / divisor)), round(took / divisor * 1e3), *where)
            for begin, took, *where in columns.frames
            if took / divisor >= LONG_FRAME_US
            and abs(begin / divisor - middle) < LONGEST_US
        ],
    )
    if text.cut:
        trace.warn(
            "truncated",
            "the file ends in mid-list: what was cut off is missing below, "
            "so shares are those of the part that was read",
        )
    if bad:
        trace.warn(
            "damaged-events",
            "1 entry could not be read as a timed event and was left out"
            if bad == 1
            else f"{bad:,} entries could not be read as timed events and "
            "were left out",
        )
    operators = (kept["kind"] == names.OPERATOR).any()
    if columns.indices > 1 and operators:
        numbered = columns.highest - columns.lowest + 1
        if numbered > 3 * columns.indices + 100:
            trace.warn(
                "sampled",
                f"only {columns.indices:,} of about {numbered:,} recorded "
                "events are in the file: idle time is an upper bound, "
                "because work that was left out looks like waiting",
            )
    _warn_of_categories(trace, columns.unknown)
    if columns.batches:
        (_, size), _ = columns.batches.most_common(1)[0]
        trace.batch = size if isinstance(size, int) and size > 0 else None
    return trace


def _warn_of_categories(trace, unknown):
    """Say which kinds of events were left out, and how many of each."""
    foreign = {n: c for n, c in unknown.items() if names.FOREIGN.match(n)}
    other = {n: c for n, c in unknown.items() if n not in foreign}
    if foreign:
        trace.warn(
            "unknown-device",
            f"{_counted(foreign)} are of a device other than CUDA and ROCm "
            "ones, whose names of work are not understood: what it did, and "
            "when it was idle, cannot be said; shares leave it out",
        )
    if other:
        trace.warn(
            "unknown-categories",
            f"{_counted(other)} are of categories that are not read here, "
            "and were left out",
        )


def _counted(events):
    rows = sorted(events.items(), key=lambda row: -row[1])
    said = ", ".join(f"{count:,} × {name[:40]}" for name, count in rows[:5])
    more = f" and {len(rows) - 5} more kinds" if len(rows) > 5 else ""
    said = "".join(c if c.isprintable() else " " for c in said)
    return f"events ({said}{more})"


# ---- files ---------------------------------------------------------------


def read(paths):
    """Yield the traces of files, tar archives and folders, in rank order.

    Args:
        paths: of .json, .json.gz, .tar, .tar.gz files or folders of these.

    Returns:
        A list of Trace, one of each process: of several recordings one
        after another the last.  What is left out, or cannot be read, is
        said in the warnings.

    Raises:
        Refusal: nothing there, or nothing readable.
    """
    found, refused = [], []
    for path in paths:
        for label, opened in _files(Path(path)):
            try:
                with opened() as file:
                    found += _read_file(file, label)
            except bench.Refusal as refusal:
                refused.append(str(refusal))
            except OSError as error:
                reason = error.strerror or error
                refused.append(f"{label}: cannot be read ({reason})")
            except MemoryError:
                refused.append(f"{label}: does not fit in memory; {SHRINK}")
    if not found:
        raise bench.Refusal(
            refused[0] if refused else f"no trace in {', '.join(paths)}"
        )
    found = _one_cycle(found)
    for sentence in refused:
        found[0].warn("unreadable", sentence)
    return sorted(found, key=lambda t: (t.rank is None, t.rank or 0, t.label))


_WORKER = re.compile(r"^(.+?)\.\d{6,}\.pt\.trace\.json", re.IGNORECASE)


def _process(trace):
    """Say what the recordings of one process have in common."""
    if trace.rank is not None:
        return f"of rank {trace.rank}"
    label = PurePosixPath(trace.label.replace("\\", "/")).name
    if found := _WORKER.match(label):  # host_pid.time.pt.trace.json
        return f"of process {found[1]}"
    hosts = trace.lane[trace.kind != names.GPU]
    if not len(hosts):
        return f"of {trace.label}"
    return f"of process {trace.lanes[np.bincount(hosts).argmax()][0]}"


def _clock_us(trace):
    """Return when a recording began and ended, on its recorder's clock."""
    return trace.base_us, trace.base_us + trace.window[1] / 1e3


def _one_cycle(found):
    """Keep one recording of each process, of the same time.

    A profiler with a schedule writes a file for each of its cycles.  They
    are no ranks: nothing in one waits for anything in another.
    """
    found = sorted(found, key=_clock_us)
    runs = _apart([trace for trace in found if trace.rank is None])
    groups = {}
    for trace in found:
        of = "that name no rank" if runs else _process(trace)
        if trace.rank is not None:
            of = _process(trace)
        groups.setdefault(of, []).append(trace)
    cycles = {of: group for of, group in groups.items() if _apart(group)}
    single = [group for of, group in groups.items() if of not in cycles]
    kept = [trace for group in single for trace in group]
    if not cycles:
        return kept
    begin, end = _clock_us(min(single or cycles.values(), key=len)[-1])

    def common_us(trace):
        first, last = _clock_us(trace)
        return min(end, last) - max(begin, first)

    for of, group in cycles.items():
        chosen = max(group, key=common_us)
        kept.append(chosen)
        left = [PurePosixPath(t.label).name for t in group if t is not chosen]
        chosen.warn(
            "several-cycles",
            f"{len(group)} recordings {of}, one after another "
            "(torch.profiler.schedule writes one for each cycle): "
            f"{PurePosixPath(chosen.label).name} is read, left out: "
            f"{', '.join(left[:4])}{', …' if len(left) > 4 else ''}",
        )
    return kept


def _apart(group):
    """Say whether several recordings, sorted, follow each other."""
    times = [_clock_us(trace) for trace in group]
    return len(group) > 1 and all(
        one[1] - two[0] <= 0.05 * min(one[1] - one[0], two[1] - two[0])
        for one, two in pairwise(times)
    )


def _files(path):
    if path.is_dir():
        inside = [
            p
            for p in sorted(path.rglob("*"))
            if p.name.lower().endswith(SUFFIXES)
            and p.is_file()
            and not p.name.startswith(".")
        ]
        if not inside:
            raise bench.Refusal(
                f"{path}: no .json, .json.gz or .tar.gz trace in this folder"
            )
        for one in inside:
            yield str(one.relative_to(path)), _opener(one)
    elif path.exists():
        yield path.name, _opener(path)
    else:
        raise bench.Refusal(f"{path}: there is no such file or folder")


def _opener(path):
    return lambda: open(path, "rb")


def _read_file(file, label):
    """Return the traces in one file: one, or an archive's several."""
    start = file.read(512)
    file.seek(0)
    if start[:2] == b"\x1f\x8b":
        try:
            start = _Unpacked(file, label).read(512)
        except (EOFError, zlib.error):
            start = b""
        file.seek(0)
        file = _Unpacked(file, label)
    if start[257:262] == b"ustar" or label.lower().endswith(
        (".tar", ".tar.gz", ".tgz")
    ):
        return _read_archive(file, label)
    return [parse(file, label)]


def _read_archive(file, label):
    """Read an archive's members as they pass; nothing lands on the disk."""
    traces, refused = [], []
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                name = member.name
                if not member.isfile() or not name.endswith(SUFFIXES):
                    continue
                if PurePosixPath(name).name.startswith("."):
                    continue  # a Mac's resource forks
                try:
                    inner = archive.extractfile(member)
                    if name.endswith(".gz"):
                        inner = _Unpacked(inner, name)
                    traces.append(parse(inner, name))
                except bench.Refusal as refusal:
                    refused.append(str(refusal))
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        if not traces:
            raise bench.Refusal(
                f"{label}: a damaged archive ({error})"
            ) from None
        traces[0].warn("truncated", f"{label}: the archive ends in mid-file")
    if not traces:
        raise bench.Refusal(
            refused[0] if refused else f"{label}: no trace in this archive"
        )
    for sentence in refused:
        traces[0].warn("unreadable", sentence)
    return traces
