"""Compare variants of one computation fairly, and keep what was measured.

A script hands its variants to ``compare``, which proves that their answers
agree, lets them take turns, and says how sure it is of each ratio.  Scripts
that count instead of timing print through ``report``.  ``--save`` writes the
rows with the machine, versions and commit they belong to.
"""

import argparse
import errno
import gc
import hashlib
import importlib.util
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from common import machine, timers
from common.answers import TOLERANCE, Mismatch, agree, parts
from common.judging import bootstrap_ratio as bootstrap_ratio
from common.judging import judge
from common.tables import WIDTH, table

METHOD = 2  # rises when measuring or judging changes: old records show it
ROOT = Path(__file__).resolve().parent.parent

ROUNDS, SMOKE_ROUNDS = 20, 3
BUDGET_S = 6.0  # of timing, for all rows of a comparison together
APART = 0.10  # a ratio from the quotient of its medians, worth a word


class Refusal(Exception):
    """A request that cannot be met: one sentence, what to do included."""


# ---- command lines -------------------------------------------------------


def run(main: Callable[[], object]) -> None:
    """Run a script's ``main`` and exit: errors of use become one sentence.

    Exit codes: 0 (or the int that ``main`` returns), 1 for variants that
    disagree, 2 for a refusal or a disk that cannot be written, 130 for
    Ctrl-C, 143 for SIGTERM (``finally`` blocks run first).  Any other
    exception is a bug and keeps its traceback.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # Windows pipes lack × and 中
            stream.reconfigure(errors="replace")
    try:
        result = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except Refusal as refusal:
        _end(2, refusal)
    except Mismatch as mismatch:
        _end(1, mismatch)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        what = (error.strerror or str(error)).lower()
        where = f": {error.filename}" if error.filename else ""
        _end(2, f"{what}{where} (space and permission are needed there)")
    except KeyboardInterrupt:
        _end(130, "interrupted")
    sys.exit(result if type(result) is int else 0)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


_UNWRITABLE = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM} | {
    getattr(errno, "EDQUOT", errno.ENOSPC)
}


def _end(code: int, sentence: object) -> None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = (
        spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    )
    print(f"{program}: {sentence}", file=sys.stderr)
    sys.exit(code)


def device_of(name: str | None = None) -> torch.device:
    """Return the device called ``name``; without a name CUDA, else the CPU.

    Raises:
        Refusal: when this machine or this torch does not have it.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refusal(
            f"--device {name}: no such kind of device; use cpu, cuda or mps"
        ) from None
    if device.type == "cpu":
        return device
    if device.type == "cuda":
        count = torch.cuda.device_count()
    else:
        found = torch.accelerator.current_accelerator(check_available=True)
        same = found is not None and found.type == device.type
        count = torch.accelerator.device_count() if same else 0
    if count == 0:
        raise Refusal(
            f"--device {name}: this machine has no such device, or torch "
            f"{torch.__version__} was built without it; use --device cpu"
        )
    if device.index is not None and device.index >= count:
        raise Refusal(f"--device {name}: only 0 to {count - 1} are here")
    return device


def cli(
    doc: str,
    argv: Sequence[str] | None = None,
    add: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """Parse the flags that every script has, and describe the script.

    Args:
        doc: the script's docstring; its lines are what ``--help`` shows.
        argv: the words after the program's name; None takes the shell's.
        add: receives the parser, to add what a lesson needs.

    Returns:
        The flags (``device`` a torch.device, ``smoke``, ``save``, those of
        ``add``) and ``sections`` (the docstring's first lines), ``expect``,
        ``script`` (dotted name), ``file`` (its path) and ``argv``.

    Raises:
        Refusal: a device that is not here, or a record that could not be
            saved: now, not after minutes of measuring.
    """
    caller = sys._getframe(1).f_globals
    file = Path(caller.get("__file__", sys.argv[0])).resolve()
    script = _dotted_name(caller, file)
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=f"python -m {script}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", help="cpu, cuda[:N] or mps (cuda, if any)")
    parser.add_argument("--smoke", action="store_true", help="seconds only")
    parser.add_argument("--save", action="store_true", help="keep a record")
    if add:
        add(parser)
    args = parser.parse_args(argv)
    args.device = device_of(args.device)
    args.smoke |= os.environ.get("BENCH_SMOKE", "0") not in ("", "0")
    args.script, args.file, args.argv = script, file, argv
    args.sections = _sections(doc)
    args.rows, args.extra = [], {}  # of the tables so far, for the record
    args.recorded = False
    expect = re.search(r"^Expect\s+(.+(?:\n[ \t]+.+)*)", doc, re.MULTILINE)
    args.expect = " ".join(expect[1].split()) if expect else None
    if args.save:
        _refuse_unsavable(args)
    return args


def _dotted_name(module: Mapping, file: Path) -> str:
    spec = module.get("__spec__")
    if spec is not None:
        return spec.name
    if file.is_relative_to(ROOT):  # started as python folder/script.py
        return ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return file.stem


def _sections(doc: str) -> list[str]:
    """Return the docstring's lines before its first empty one."""
    return [line.strip() for line in doc.strip().split("\n\n")[0].split("\n")]


# ---- records -------------------------------------------------------------


def write_atomic(path: str | Path, data: str | bytes) -> Path:
    """Write ``path`` whole or not at all: beside it first, then renamed.

    Raises:
        OSError: full or read-only disk; carries ``path`` as its filename.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = data.encode() if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # ENOSPC names none, others ``beside``
        try:
            beside.unlink(missing_ok=True)
        except OSError:
            pass
        raise
    return path


def script_hash(file: str | Path) -> str:
    """Return the SHA-256 of a script, the same under any line ending."""
    source = Path(file).read_bytes().replace(b"\r\n", b"\n")
    return hashlib.sha256(source).hexdigest()


def digests(files: Iterable[str]) -> dict[str, str]:
    """Return {file: part of its SHA-256}, of files named from the root.

    In a record's ``key.sources`` they say what else made its figures.
    """
    return {name: script_hash(ROOT / name)[:16] for name in files}


def _refuse_unsavable(args: argparse.Namespace) -> dict:
    if args.smoke:
        raise Refusal(
            "--save: a smoke run measures nothing worth keeping; leave out "
            "--smoke (and unset BENCH_SMOKE)"
        )
    source = machine.source()
    if source.get("dirty"):
        raise Refusal(
            "--save: tracked source has uncommitted changes, so the record "
            "could not say what it measured; commit them first"
        )
    return source


def record(
    args: argparse.Namespace, rows: list[dict], extra: dict | None = None
) -> Path | None:
    """Keep ``rows`` with the machine and code they belong to, if asked.

    A script that makes several tables keeps the rows of all of them. The
    record goes to ``results/<machine>.json`` in the script's chapter
    folder (``$BENCH_RESULTS/<chapter>/<machine>.json``, if that is set)
    under the script's dotted name; other scripts' entries are kept.

    Args:
        args: from ``cli``; nothing is written unless ``args.save``.
        rows: plain dicts.
        extra: more fields of the entry.

    Returns:
        The file's path, or None.

    Raises:
        Refusal: a smoke run, or tracked source with uncommitted changes.
    """
    args.rows = [*args.rows, *rows]
    args.extra = args.extra | (extra or {})
    if not args.save:
        return None
    source = _refuse_unsavable(args)
    card = machine.card(args.device)
    entry = {
        "sections": args.sections,
        "argv": [_bare(word) for word in args.argv],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(args.device),
        "machine": card,
        "source": source,
        "script_sha256": script_hash(args.file),
        "method": METHOD,
        "rows": args.rows,
        **args.extra,
    }
    chapter = _chapter(args.file)
    folder = chapter / "results"
    if os.environ.get("BENCH_RESULTS"):
        folder = Path(os.environ["BENCH_RESULTS"]) / chapter.name
    path = folder / f"{card['id']}.json"
    entries = (_read_record(path) if path.exists() else {}) | {
        args.script: entry
    }
    text = json.dumps(
        dict(sorted(entries.items())),
        indent=1,
        ensure_ascii=False,
        default=lambda v: v.item() if hasattr(v, "item") else str(v),
    )
    write_atomic(path, text + "\n")
    if not args.recorded:  # more rows of the same script may follow
        print(f"recorded in {path}")
    args.recorded = True
    return path


def _chapter(file: Path) -> Path:
    """Return the folder of the chapter that a script belongs to."""
    if file.is_relative_to(ROOT):
        return ROOT / file.relative_to(ROOT).parts[0]
    return file.parent


def _bare(word: str) -> str:
    """Shorten an absolute path to its name: it says nothing elsewhere."""
    path = Path(str(word))
    return path.name if path.is_absolute() else word


def _read_record(path: Path) -> dict:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        entries = None
    if not isinstance(entries, dict):
        raise Refusal(f"{path} is not a record (JSON object); move it away")
    return entries


def load_records(folder: str | Path) -> dict[str, dict[str, dict]]:
    """Read a chapter's records: ``{machine id: {script: entry}}``.

    Args:
        folder: a chapter's folder, or its ``results`` itself.

    Raises:
        Refusal: a file there is not a record.
    """
    folder = Path(folder)
    if (folder / "results").is_dir():
        folder = folder / "results"
    return {
        path.stem: _read_record(path) for path in sorted(folder.glob("*.json"))
    }


def is_current(entry: Mapping, script: str) -> bool:
    """Say whether a record was made by the script and method of today."""
    try:
        spec = importlib.util.find_spec(script)
    except ModuleNotFoundError:  # the folder is gone, too
        spec = None
    return (
        spec is not None
        and entry.get("method") == METHOD
        and entry.get("script_sha256") == script_hash(spec.origin)
    )


# ---- comparing ------------------------------------------------------------


def _bound_s(flops, bytes, dtype: str, device: torch.device) -> float | None:
    """Return the seconds below which this machine cannot do the work."""
    peaks = machine.peaks(device)
    bounds = []
    if flops and peaks["gemm_flops"].get(dtype):
        bounds.append(flops / peaks["gemm_flops"][dtype])
    # the memory's rate is no ceiling for what a cache may hold
    reaches_memory = bytes and bytes > (peaks.get("cache_bytes") or 0)
    if reaches_memory and peaks.get("copy_bytes_per_s"):
        bounds.append(bytes / peaks["copy_bytes_per_s"])
    return max(bounds, default=None)


def _agreeing(variants, tolerance, gradients) -> tuple[list, dict, int]:
    """Make the variants; return them, their errors, and the parts compared."""
    functions, errors, expected = [], {}, None
    for name, factory in variants.items():
        gc.collect()
        functions.append(factory())
        found = dict(parts(functions[-1]()))
        if expected is None:
            baseline, expected = name, found
        limits = tolerance
        if isinstance(tolerance, Mapping):
            limits = tolerance.get(name, TOLERANCE)
        errors[name] = agree(
            name, found, baseline, expected, limits, gradients
        )
    return functions, errors, len(expected)


def compare(
    args: argparse.Namespace,
    variants: Mapping[str, Callable[[], Callable[[], object]]],
    *,
    per_call: float = 1,
    unit: str = "call",
    tolerance: tuple | None | Mapping = TOLERANCE,
    gradients: tuple | None | str = "alike",
    flops: float | Mapping | None = None,
    bytes: float | Mapping | None = None,
    dtype: str = "float32",
    expect: str | None = None,
    budget_s: float = BUDGET_S,
    extra: dict | None = None,
    title: str | None = None,
) -> list[dict]:
    """Prove that variants agree, time them in turn, print, record if asked.

    Args:
        args: from ``cli``.
        variants: name to factory; a factory returns a fresh callable, whose
            first result is compared.  The first row is the baseline.
        per_call: units that one call works through.
        unit: the name of one.
        tolerance: (relative, absolute) for floating-point parts of results
            (nested dicts, lists, tensors), None for the same bits; or a
            dict of these per row, where missing rows get the default.
        gradients: tolerance of what lies below a result's "gradients" key.
        flops: per call, or per row; with ``bytes`` and ``dtype`` they add
            the share of this machine's measured ceiling.
        bytes: moved per call, read and written, or per row; a ceiling only
            where they are more than the caches hold.
        dtype: whose GEMM ceiling counts.
        expect: what should happen; else the docstring's Expect.
        budget_s: seconds of timing for all rows; 20 rounds take place
            whatever it is, 3 in a smoke run.
        extra: more fields of the record.
        title: of this table, where a script makes several.

    Returns:
        Rows of ``judge`` in seconds per unit, with unit, worst_error,
        compared (parts of the answer) and ceiling (share, or None).

    Raises:
        Mismatch: before anything is timed.
    """
    gc.collect()  # once in full; below only what the variants leave
    gc.freeze()
    try:
        functions, errors, count = _agreeing(variants, tolerance, gradients)
    finally:
        gc.unfreeze()
    samples = timers.take_turns(
        functions,
        args.device,
        rounds=SMOKE_ROUNDS if args.smoke else ROUNDS,
        budget_s=0.0 if args.smoke else budget_s,
    )
    rows = judge(list(variants), samples / per_call, args.smoke)
    for row in rows:
        work = [
            amount.get(row["name"]) if isinstance(amount, Mapping) else amount
            for amount in (flops, bytes)
        ]
        bound_s = None
        if any(work) and not args.smoke:
            bound_s = _bound_s(*work, dtype, args.device)
        row |= {
            "unit": unit,
            "worst_error": errors[row["name"]],
            "compared": count,
            "ceiling": bound_s and bound_s / per_call / row["median_s"],
        } | ({"title": title} if title else {})
    _print_comparison(args, rows, expect, title)
    record(args, rows, extra)
    return rows


def _print_comparison(
    args, rows: list[dict], expect: str | None, title: str | None
) -> None:
    _print_head(args, expect)
    print("", _drawn(rows, title), "", sep="\n")
    count = rows[0]["compared"]
    worst = max(row["worst_error"] for row in rows)
    answers = f"answers agree (parts: {count}, worst error {worst:.2g})"
    if not count:
        answers = "no answers returned, none compared"
    print(f"{answers} · {rows[0]['rounds']} paired rounds, 99% intervals")
    _print_ratios_apart(args, rows)
    _print_machine(args)


def _print_ratios_apart(args, rows: list[dict]) -> None:
    """Say which ratios are not the quotient of the medians beside them."""
    first = rows[0].get("median_s") if rows and not args.smoke else None
    apart = [
        row["name"]
        for row in rows
        if first
        and "ratio" in row
        and abs(row["ratio"] * row["median_s"] / first - 1) > APART
    ]
    if apart:
        words = (
            f"{', '.join(apart)}: the ratio is the median of the rounds' "
            "ratios, not the quotient of the medians, which differs by more "
            f"than {APART:.0%} here"
        )
        print(textwrap.fill(words, WIDTH))


def _drawn(rows: list[dict], title: str | None = None) -> str:
    """Draw rows of ``compare`` as it prints them."""
    columns = {
        "name": "row",
        "median_s": f"s per {rows[0]['unit']}",
        "iqr_s": "IQR",
        "verdict": "speed",
    }
    if any(row["ceiling"] for row in rows):
        columns["ceiling_percent"] = "% of ceiling"
    if any(row["noisy"] for row in rows):
        columns["noise"] = ""
    shown = [
        row
        | {
            "ceiling_percent": row["ceiling"] and round(100 * row["ceiling"]),
            "noise": "noisy" if row["noisy"] else "",
        }
        for row in rows
    ]
    return table(shown, columns, title)


def _print_head(args, expect: str | None) -> None:
    """Print what a table should show; above the first, what the script is."""
    if not args.rows:
        print(*args.sections, sep="\n")
        expect = expect or args.expect
    elif expect:
        print()
    if expect:
        words = f"expect: {expect}"
        print(textwrap.fill(words, WIDTH, subsequent_indent=" " * 8))


def _print_machine(args) -> None:
    if args.rows:
        return
    print(machine.line(machine.card(args.device)))
    if args.smoke:
        print("smoke run: small and short, its figures mean nothing")


def report(
    args: argparse.Namespace,
    rows: list[dict],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    extra: dict | None = None,
    title: str | None = None,
    expect: str | None = None,
) -> list[dict]:
    """Print rows of counts or bytes in the same look; record if asked."""
    _print_head(args, expect)
    print("", table(rows, columns, title), "", sep="\n")
    _print_ratios_apart(args, rows)
    _print_machine(args)
    if title:
        rows = [row | {"title": title} for row in rows]
    shown = args.extra.get("columns", {}) | {title or "": columns}
    record(args, rows, (extra or {}) | {"columns": shown})
    return rows


def left_out(args: argparse.Namespace, what: str, kind: str = "cuda") -> None:
    """Say what this machine cannot show; show the record of one that can.

    Args:
        args: from ``cli``.
        what: one line: what was left out, and why.
        kind: of the device that the whole experiment needs.
    """
    words = f"left out: {what}"
    print(textwrap.fill(words, WIDTH, subsequent_indent=" " * 10))
    chapter = _chapter(args.file)
    found = 0
    for name, entries in load_records(chapter).items():
        entry = entries.get(args.script)
        if not entry or not str(entry.get("device", "")).startswith(kind):
            continue
        found += 1
        old = "" if is_current(entry, args.script) else ", an older version"
        print(f"\nrecorded on {name}{old}:")
        groups: dict = {}
        for row in entry["rows"]:
            groups.setdefault(row.get("title"), []).append(row)
        for title, rows in groups.items():
            if all({"iqr_s", "ceiling"} <= row.keys() for row in rows):
                print(_drawn(rows, title))
            else:
                columns = entry.get("columns", {}).get(title or "")
                print(table(rows, columns, title))
    if not found:
        print(f"no record of a machine with {kind.upper()} yet")
