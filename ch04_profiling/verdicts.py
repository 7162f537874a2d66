"""Parts of a span become at most three findings, each with its evidence.

A finding says what would be gained at most if it were cured: the time it
owns.  Waiting is named before working, because it can be removed; what a GPU
that is hardly ever idle works at comes first only where it computes nearly
all the time.
"""

import re

import numpy as np

from ch04_profiling import event_names as names
from ch04_profiling.accounting import (
    ALLOCATION,
    CODE,
    LONG_CALL_NS,
    account,
    by_name,
    inside,
    of_gpu_job,
    optimizing,
    overlap_ns,
    seen,
)

NOTABLE = 0.05  # of the span: less is not worth a finding
HOST_NOTABLE = 0.10  # some launch overhead is in every program
CPU_NOTABLE = 0.30  # and calling operators is more of a CPU program's time
STARTING = 0.10  # of start-up in a profile that should be of steps
COMPUTING = 0.80  # from here on the GPU itself is the bottleneck
LITTLE_IDLE = 0.10  # below, what it works at is worth a finding too
UNEXPLAINED = 0.5  # of the span: the rest is not worth reading
MOST = 3  # findings

FEW_EVENTS, SHORT_NS = 20, 5_000_000
TINY_KERNEL_US = 10.0
ITEMS, ITEMS_IN_ALL = 20, 100  # of a step, of a recording without steps

CURES = {
    "data-bound": ("6.1.1", "ch06_single_gpu_perf.loader_workers"),
    "host-bound": ("9.3.1", "ch09_advanced.compile_modes"),
    "sync-bound": ("6.3", "ch06_single_gpu_perf.hidden_syncs"),
    "transfer-bound": ("6.1.2", "ch06_single_gpu_perf.async_copy"),
    "compute-bound": ("9.1.3", "ch09_advanced.mixed_precision"),
    "bandwidth-bound": ("6.2.2", "ch06_single_gpu_perf.fused_operators"),
    "communication-bound": ("8.3.3", "ch08_distributed.ddp"),
    "straggler": ("8.3.4", "ch08_distributed.scaling_efficiency"),
    "start-up": ("4.2.2", "ch04_profiling.warm_up"),
    "compilation": ("9.3.1", "ch09_advanced.compile_modes"),
    "no-gpu-events": ("4.3.1", "ch04_profiling.profile_ops"),
}
KINDS = list(CURES)
IN_PYTHON = "4.5.1", "ch04_profiling.py_spy"
ALLOCATING = "7.1", "ch07_memory.caching_allocator"
COPYING = "6.4.1", "ch06_single_gpu_perf.tensor_creation"
COMPILED = re.compile(r"compile_inner|bw_compiler|backward_impl")
COUNTERS = "4.4.2", "ch04_profiling.nsight_compute"
OPERATORS = "4.3.1", "ch04_profiling.profile_ops"
WORKING = ("compute-bound", "bandwidth-bound")


class Rank:
    """One trace, its account, and the figures that findings quote."""

    def __init__(self, trace, number):
        self.trace, self.number = trace, number
        self.account = account(trace)
        self.span = max(self.account.span_ns, 1)
        self.parts = self.account.parts_ns()

    def share(self, *parts):
        return sum(self.parts[p] for p in parts) / self.span

    def share_in(self, part, union):
        """Return how much of the span is a part's and in merged intervals."""
        mine = self.account.owner == CODE[part]
        bounds = self.account.bounds
        pieces = bounds[:-1][mine], bounds[1:][mine]
        return overlap_ns(pieces, union) / self.span

    @property
    def allocating(self):
        """Return the share in which each step reserves its memory anew."""
        return self.share_in("idle_start_up", self.account.allocating)

    @property
    def queued(self):
        """Return the share in which launched work did not start."""
        lows, highs, _ = self.account.queued
        return self.share_in("idle_unknown", (lows, highs))

    @property
    def working(self):
        """Return the share in which kernels, copies on it or fills ran."""
        return self.share(*names.COMPUTE, "copy_d2d")

    def at(self, ns):
        """Write a time into the trace."""
        return f"{ns / 1e6:.3f} ms"

    def longest(self, part, without=None):
        """Return (length, start) in ns of a part's longest piece."""
        account = self.account
        mine = np.flatnonzero(account.owner == CODE[part])
        if without is not None:
            mine = mine[~inside(without, account.bounds[mine])]
        if not len(mine):
            return 0, 0
        lengths = np.diff(account.bounds)[mine]
        best = int(np.argmax(lengths))
        return int(lengths[best]), int(account.bounds[mine[best]])

    def gpu_window(self):
        """Return first and last ns of the device's work."""
        trace, gpu = self.trace, self.account.gpu
        _, _, starts, ends = self.account.between
        starts = np.concatenate([trace.start[gpu], starts])
        ends = np.concatenate([trace.end[gpu], ends])
        if not len(starts):
            return 0, self.span
        return int(starts.min()), int(ends.max())

    @property
    def too_short(self):
        if not self.account.on_gpu:
            return False
        return len(self.account.gpu) < FEW_EVENTS or self.span < SHORT_NS

    @property
    def begins_late(self):
        """Say whether a short trace is mostly the time before any work."""
        first = int(re.sub(r"\D", "", (self.account.steps or [("0",)])[0][0]))
        low, _ = self.gpu_window()
        return self.too_short and first <= 1 and low > 0.5 * self.span

    @property
    def sampled(self):
        return any(w["kind"] == "sampled" for w in self.trace.warnings)

    @property
    def empty(self):
        """Say whether nothing but marks and ranges was recorded."""
        known = self.share("idle_loader", "idle_compilation")
        return not (known or self.account.on_gpu or seen(self.trace))

    @property
    def unread(self):
        """Say whether the work of a device, or all of it, is not there."""
        gpu = not self.account.on_gpu and of_gpu_job(self.trace)
        return gpu or self.empty

    @property
    def unexplained(self):
        """Return the share that is idle without any event that says why."""
        return self.share("idle_unknown") - self.queued


def _finding(kind, rank, share, gain, evidence, cure=None):
    section, script = cure or CURES[kind]
    return {
        "kind": kind,
        "rank": rank.number,
        "share_of_span": round(min(max(share, 0.0), 1.0), 4),
        "gain_bound": round(min(max(gain, 0.0), 1.0), 4),
        "evidence": evidence,
        "section": section,
        "script": script,
    }


def _ms(ns):
    return f"{ns / 1e6:,.1f} ms" if ns >= 100_000 else f"{ns / 1e3:.1f} µs"


def _counted(count, noun):
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _percent(share):
    return f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1f}%"


# ---- one finding each ----------------------------------------------------


def data_bound(rank):
    starts, ends = rank.account.loader
    total = int((ends - starts).sum())
    gain = rank.share("idle_loader")
    if gain < NOTABLE:
        return None
    length, start = rank.longest("idle_loader")
    trace = rank.trace
    loaders = sorted(
        {n for n in trace.names if names.LOADER_NAME.search(n)}, key=len
    )
    evidence = (
        f"the step waits {_ms(total)} ({_percent(total / rank.span)} of the "
        f"span) in {_counted(len(starts), 'call')} of {loaders[-1]}; for "
        f"{_ms(rank.parts['idle_loader'])} of it the device had nothing to "
        f"do, longest {_ms(length)} at {rank.at(start)}"
    )
    return _finding("data-bound", rank, total / rank.span, gain, evidence)


def host_bound(rank):
    """The device waits for operators, launches and Python of the host."""
    account, trace = rank.account, rank.trace
    if not seen(trace):
        return None
    share, memory = rank.share("idle_host"), rank.allocating
    # before the first work and after the last, nothing was waited for
    low, high = rank.gpu_window()
    unseen = account.parts_ns(low, high)["idle_unknown"] / rank.span
    unseen = max(unseen - rank.queued, 0.0)
    if rank.unexplained > UNEXPLAINED:
        unseen = 0.0  # as after a wrong clock: nobody's
    total = share + unseen + memory
    enough = HOST_NOTABLE if account.on_gpu else CPU_NOTABLE
    if total < enough and memory < NOTABLE:
        return None
    said = []
    if share >= NOTABLE / 5:
        said.append(_behind(rank))
    cure = None
    if account.on_gpu and len(account.gpu):
        lengths = trace.end[account.gpu] - trace.start[account.gpu]
        middle = float(np.median(lengths)) / 1e3
        said.append(
            f"{len(lengths):,} kernels and copies, median {middle:.1f} µs"
        )
        if middle > TINY_KERNEL_US:
            cure = "6.2.1", "ch06_single_gpu_perf.batch_size"
    elif not account.on_gpu:
        tiny, median = _tiny_operators(rank)
        said.append(f"{tiny:,} operators of a median of {median:.1f} µs")
        cure = "6.2.2", "ch06_single_gpu_perf.fused_operators"
    said += _long_launches(rank)
    python = _python_between(rank)
    if 5 * python >= total:
        said.append(_where_in_python(rank, python))
    if 5 * memory >= total:
        said.append(_reserving(rank, memory))
    if max(python, memory) * 2 > total:
        cure = IN_PYTHON if python > memory else ALLOCATING
    if unseen > NOTABLE:
        length, start = rank.longest("idle_unknown", account.queued[:2])
        said.append(
            f"for {_percent(unseen)} of the span no recorded event says what "
            f"the host did, longest {_ms(length)} at {rank.at(start)}"
        )
    if rank.sampled:
        said.append("events are missing, so this is an upper bound")
    evidence = "; ".join(said)
    return _finding("host-bound", rank, total, total, evidence, cure)


def _behind(rank):
    """Say how long nothing ran because the host had not got so far."""
    length, start = rank.longest("idle_host")
    lost = _ms(rank.parts["idle_host"])
    longest = f"longest {_ms(length)} at {rank.at(start)}"
    if not rank.account.on_gpu:
        return (
            f"{lost} went into operators too short to count as work, and "
            f"between operators; {longest}"
        )
    gaps = int((rank.account.owner == CODE["idle_host"]).sum())
    return (
        f"for {lost} in {_counted(gaps, 'gap')} nothing was ready to run "
        "because the host had not got so far (operators, launches, Python); "
        f"{longest}"
    )


def _long_launches(rank):
    """Name the launches of which every one takes milliseconds."""
    trace, said = rank.trace, []
    took = trace.end - trace.start
    runtime = trace.kind == names.RUNTIME
    for at in np.unique(trace.name[runtime & (took > LONG_CALL_NS)]).tolist():
        name = trace.names[at]
        if names.host_meaning(names.RUNTIME, name) != names.ACTIVE:
            continue
        mine = took[runtime & (trace.name == at)]
        middle = float(np.median(mine))
        if "emcpy" not in name and len(mine) > 2 and middle > LONG_CALL_NS:
            said.append(f"{len(mine)} × {name} take {_ms(middle)} each")
    return said


def _python_between(rank):
    """Return the share in which the host ran Python outside of operators."""
    if rank.sampled or not (rank.trace.kind == names.OPERATOR).any():
        return 0.0  # operators may have been there
    return rank.share_in("idle_host", rank.account.python)


def _where_in_python(rank, share):
    """Name the innermost functions or ranges around gaps of Python."""
    lows, highs = rank.account.python
    longest = np.argsort(lows - highs)[:200]
    starts, ends, labels = _around(rank)
    sums = {}
    for low, high in zip(lows[longest], highs[longest], strict=True):
        held = np.minimum(ends, high) - np.maximum(starts, low)
        at = np.flatnonzero(5 * held >= 4 * (high - low))
        at = at[np.argsort((ends - starts)[at], kind="stable")]
        label = _innermost([labels[i] for i in at.tolist()])
        sums[label] = sums.get(label, 0) + int(high - low)
    known = sorted((label for label in sums if label), key=lambda n: -sums[n])
    length, start = max(zip(highs - lows, lows, strict=True))
    where, hint = "in Python", ""
    if known and sum(sums[label] for label in known) > sums.get(None, 0):
        known = [n for n in known[:2] if 10 * sums[n] > sums[known[0]]]
        shown = [f"{name} ({_ms(sums[name])})" for name in known]
        where = f"in {', '.join(shown)}"
    elif not rank.trace.frames:
        hint = " (py-spy, or a recording with_stack=True, names the function)"
    return (
        f"for {_percent(share)} of the span the host was {where}, outside of "
        f"any operator, longest {_ms(length)} at {rank.at(start)}{hint}"
    )


def _around(rank):
    """Return starts, ends and names of long Python frames and ranges."""
    trace, account = rank.trace, rank.account
    marks = np.array([bool(names.STEP.match(n)) for n in trace.names])
    chosen = (trace.kind == names.RANGE) & ~marks[trace.name]
    chosen &= np.isin(trace.lane, account.lanes)
    events = np.flatnonzero(chosen)
    feeding = {trace.lanes[lane] for lane in account.lanes.tolist()}
    frames = [f for f in trace.frames if f[3] in feeding]
    starts = [*trace.start[events].tolist(), *(f[0] for f in frames)]
    ends = [*trace.end[events].tolist(), *(f[0] + f[1] for f in frames)]
    labels = [trace.names[n] for n in trace.name[events].tolist()]
    labels += [f[2] for f in frames]
    return np.array(starts, np.int64), np.array(ends, np.int64), labels


def _innermost(labels):
    """Return a name for where a thread was, given frames from inside out."""
    if not labels:
        return None
    own = next((n for n in labels if not n.startswith("<built-in")), None)
    if own is None:
        return labels[0]
    called = f" → {labels[0]}" if labels[0].startswith("<built-in") else ""
    # without the folders
    return re.sub(r"^.*[/\\](?=[^/\\]*\.py\()", "", own) + called


def _reserving(rank, share):
    """Name the calls that give memory back and reserve it in every step."""
    trace, account = rank.trace, rank.account
    named = np.array([bool(ALLOCATION.match(n)) for n in trace.names])
    calls = named[trace.name] & (trace.kind == names.RUNTIME)
    calls &= inside(account.allocating, trace.start)
    found, counts = np.unique(trace.name[calls], return_counts=True)
    order = np.argsort(-counts)[:3]
    shown = ", ".join(f"{counts[i]} × {trace.names[found[i]]}" for i in order)
    return (
        f"for {_percent(share)} of the span it reserves memory ({shown}): the "
        "caching allocator frees and allocates in every step, as when memory "
        "is short or fragmented"
    )


def _tiny_operators(rank):
    trace = rank.trace
    operators = trace.kind == names.OPERATOR
    lengths = (trace.end - trace.start)[operators] / 1e3
    return len(lengths), float(np.median(lengths)) if len(lengths) else 0.0


def waiting_calls(rank):
    """Return one row per name of synchronising call, the longest first."""
    rows = [
        {
            "name": name,
            "count": row["count"],
            "us": row["ns"] / 1e3,
            "longest_us": row["longest"][0] / 1e3,
            "longest_at_us": row["longest"][1] / 1e3,
            "callers": row["callers"],
        }
        for name, row in rank.account.sync.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _named_calls(rank):
    said = []
    for row in waiting_calls(rank)[:4]:
        callers = sorted(row["callers"].items(), key=lambda c: -c[1])
        inside_of = (
            f" in {', '.join(_spoken(name) for name, _ in callers[:2])}"
            if callers
            else ""
        )
        said.append(
            f"{row['count']} × {row['name']}{inside_of} "
            f"({_ms(row['us'] * 1e3)})"
        )
    return ", ".join(said)


def _spoken(name):
    return ".item()" if name == "aten::item" else name


def sync_bound(rank):
    account = rank.account
    if not account.on_gpu:
        return _item_storm(rank)
    uploads = _idle_in_uploads(rank)
    gain = rank.share("idle_sync") - uploads / rank.span
    if gain < (NOTABLE / 2 if rank.too_short else NOTABLE):
        return None
    length, start = rank.longest("idle_sync")
    evidence = (
        f"the host waits for the GPU in {_named_calls(rank)}; because it "
        "cannot launch ahead meanwhile, the GPU then has nothing to do for "
        f"{_ms(gain * rank.span)}, longest {_ms(length)} at {rank.at(start)}"
    )
    return _finding("sync-bound", rank, gain, gain, evidence)


def _item_storm(rank):
    """Without a GPU ``.item()`` waits for nothing, but it is there.

    An optimizer keeps its counts, and a loader its labels, on the host: to
    read those makes no GPU wait.
    """
    trace = rank.trace
    operator = trace.kind == names.OPERATOR
    if not operator.any() or of_gpu_job(trace):
        return None
    chosen = operator & by_name(trace, lambda n: n == "aten::item")[trace.name]
    loading = inside(rank.account.loader, trace.start)
    chosen &= ~(loading | inside(optimizing(trace), trace.start))
    count = int(chosen.sum())
    steps = max(_begun(rank).values())
    many = count >= ITEMS * steps
    if not steps:
        many = count >= ITEMS_IN_ALL and count >= 0.02 * operator.sum()
    if not many or not count:
        return None
    total = int((trace.end - trace.start)[chosen].sum())
    each = f", {count / steps:,.0f} in each step" if steps else ""
    evidence = (
        f"{count:,} × .item(){each} ({_percent(count / operator.sum())} of "
        f"all operators, {_ms(total)}); on a GPU each would make the host "
        f"wait for all work before it; first at "
        f"{rank.at(trace.start[chosen][0])}"
    )
    share = total / rank.span
    return _finding("sync-bound", rank, share, share, evidence)


def _begun(rank):
    """Return how many steps were marked, and begun in other ways."""
    trace, found = rank.trace, {"marks": len(rank.account.steps)}
    host = np.bincount(
        trace.name[trace.kind != names.GPU], minlength=len(trace.names)
    )
    for begins in ("Optimizer.step#", "enumerate(DataLoader)#"):
        mine = [name.startswith(begins) for name in trace.names]
        found[begins] = int(host[mine].max(initial=0))
    return found


def steps_of(rank):
    """Return the number of steps: marks, else optimizers, else batches."""
    return next((count for count in _begun(rank).values() if count), 0)


def _idle_in_uploads(rank):
    """Return ns without GPU work in which a copy call held the host."""
    account = rank.account
    mine = account.owner == CODE["idle_sync"]
    pieces = account.bounds[:-1][mine], account.bounds[1:][mine]
    return overlap_ns(pieces, account.uploading)


def copies(rank):
    """Return per direction: count, µs, bytes, and what the names tell."""
    trace, account = rank.trace, rank.account
    found = {}
    if not account.on_gpu:
        return found
    for part in names.COPIES:
        events = account.gpu[account.work == CODE[part]]
        if not len(events):
            continue
        sizes = trace.bytes[events]
        length = (trace.end - trace.start)[events]
        kinds = {}
        for event in events.tolist():
            name = trace.names[trace.name[event]]
            for kind in ("Pageable", "Pinned"):
                if kind in name:
                    row = kinds.setdefault(kind.lower(), [0, 0])
                    row[0] += 1
                    row[1] += int(trace.end[event] - trace.start[event])
        known = int(sizes[sizes >= 0].sum())
        found[part] = {
            "count": len(events),
            "us": int(length.sum()) / 1e3,
            "bytes": known if (sizes >= 0).any() else None,
            **{
                kind: {"count": n, "us": ns / 1e3}
                for kind, (n, ns) in kinds.items()
            },
        }
    return found


def transfer_bound(rank):
    if not rank.account.on_gpu:
        return None
    held = _idle_in_uploads(rank)
    shown = rank.parts["copy_h2d"] + rank.parts["copy_d2h"]
    share = (shown + held) / rank.span
    if share < NOTABLE:
        return None
    rows = copies(rank)
    said, pageable = [], 0.0
    for part, word in (("copy_h2d", "to"), ("copy_d2h", "from")):
        if part not in rows:
            continue
        row = rows[part]
        size = row["bytes"]
        rate = f", {size / row['us'] / 1e3:.1f} GB/s" if size else ""
        kinds = [k for k in ("pageable", "pinned") if k in row]
        said.append(
            f"{row['count']} copies {word} the GPU take {_ms(row['us'] * 1e3)}"
            f"{rate}{' (' + ', '.join(kinds) + ')' if kinds else ''}"
        )
        pageable += row.get("pageable", {}).get("us", 0.0)
    length, start = max(rank.longest("copy_h2d"), rank.longest("copy_d2h"))
    evidence = (
        f"{'; '.join(said)}; {_ms(shown)} of it beside no computing, longest "
        f"{_ms(length)} at {rank.at(start)}"
    )
    if held:
        evidence += (
            f"; for another {_ms(held)} the copy calls held the host while "
            "the GPU had nothing to do"
        )
    cure = None
    across = [row["us"] for part, row in rows.items() if part != "copy_d2d"]
    if pageable * 2 < sum(across):
        cure = "6.1.3", "ch06_single_gpu_perf.overlap_copies"
    return _finding("transfer-bound", rank, share, share, evidence, cure)


def communication_bound(rank):
    share = rank.share("communication")
    if share < NOTABLE:
        return None
    account = rank.account
    total = account.total_ns("communication")
    length, start = rank.longest("communication")
    kinds = collectives(rank)
    top = ", ".join(
        f"{count} × {name} ({_ms(ns)})" for name, count, ns in kinds[:3]
    )
    evidence = (
        f"{top}: {_ms(total)} ({_percent(total / rank.span)} of the span), "
        f"of which {_ms(rank.parts['communication'])} beside no computing, "
        f"longest {_ms(length)} at {rank.at(start)}; waiting for later ranks "
        "is part of it"
    )
    cure = None
    words = kinds[0][0].lower() if kinds else ""
    if "sendrecv" in words or "alltoall" in words or "all_to_all" in words:
        cure = "8.2", "ch08_distributed.collectives"
    elif "gather" in words or "scatter" in words:
        cure = "8.4.2", "ch08_distributed.fsdp"
    return _finding("communication-bound", rank, share, share, evidence, cure)


def collectives(rank):
    """Return (short name, count, ns) of each kind of collective."""
    trace, account = rank.trace, rank.account
    events = account.gpu[account.work == CODE["communication"]]
    found = {}
    for event in events.tolist():
        name = trace.names[trace.name[event]].split("(")[0]
        row = found.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += int(trace.end[event] - trace.start[event])
    rows = [(name, count, ns) for name, (count, ns) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def start_up(rank):
    """CUDA is initialised, memory reserved, code loaded; or little else."""
    share = rank.share("idle_start_up") - rank.allocating
    low, _ = rank.gpu_window()
    late = rank.begins_late
    if share < STARTING and not late:
        return None
    busy = sum(rank.parts[p] for p in names.WORK)
    said = []
    if share >= NOTABLE:
        long = _long_driver_calls(rank)
        said.append(f"the device waits for {', '.join(long)}")
    if late:
        share = max(share, low / rank.span)
        said.append(f"the first GPU work begins at {rank.at(low)}")
    work = f"GPU work is {_ms(busy)} of {_ms(rank.span)}"
    rows = copies(rank)
    pageable = sum(
        row.get("pageable", {}).get("us", 0.0) for row in rows.values()
    )
    if pageable * 1e3 > 0.3 * busy:
        work += f", {_ms(pageable * 1e3)} of it pageable copies"
    said.append(work)
    return _finding("start-up", rank, share, share, "; ".join(said))


def _long_driver_calls(rank, count=4):
    trace = rank.trace
    calls = np.flatnonzero(trace.kind == names.RUNTIME)
    sums = {}
    for call in calls[(trace.end - trace.start)[calls] > 100_000].tolist():
        name = trace.names[trace.name[call]]
        if names.SYNC_NAME.match(name) or "emcpy" in name:
            continue
        row = sums.setdefault(name, [0, 0, int(trace.start[call])])
        row[0] += int(trace.end[call] - trace.start[call])
        row[1] += 1
    rows = sorted(sums.items(), key=lambda item: -item[1][0])[:count]
    return [
        f"{n} × {name} ({_ms(ns)}, from {rank.at(at)})"
        for name, (ns, n, at) in rows
    ]


def compilation(rank):
    share = rank.share("idle_compilation")
    if share < NOTABLE:
        return None
    trace = rank.trace
    named = np.array(
        [bool(names.COMPILATION_NAME.search(n)) for n in trace.names]
    )
    # a frame; a gradient's part is compiled later, by its first backward
    frames = named & by_name(trace, lambda n: bool(COMPILED.search(n)))
    hosts = trace.kind != names.GPU
    events = np.flatnonzero(frames[trace.name] & hosts)
    if not len(events):
        events = np.flatnonzero(named[trace.name] & hosts)
    lanes = trace.lane[events]
    reach, outer = {}, 0
    for event, lane in zip(events.tolist(), lanes.tolist(), strict=True):
        if trace.start[event] >= reach.get(lane, -1):
            outer += 1
            reach[lane] = trace.end[event]
    length, start = rank.longest("idle_compilation")
    stop = "stops" if outer == 1 else "stop"
    evidence = (
        f"{_counted(outer, 'compilation')} {stop} the program for "
        f"{_ms(rank.parts['idle_compilation'])}, longest {_ms(length)} at "
        f"{rank.at(start)}; the first ones belong into a warm-up, and what "
        "compiles after it is recompiled (TORCH_LOGS=recompiles says why)"
    )
    return _finding("compilation", rank, share, share, evidence)


def working(rank):
    """Name what the device works at, where it works nearly all the time."""
    products = rank.share("gemm", "attention")
    moved = rank.share("copy_d2d")
    streams = rank.share("elementwise", "optimizer") + moved
    unknown = rank.share("other_kernel")
    kind, share, parts = "compute-bound", products, ("gemm", "attention")
    if streams > products:
        kind, share = "bandwidth-bound", streams
        parts = ("elementwise", "optimizer", "copy_d2d")
    if unknown > share:  # neither kind can be told from a name of one's own
        kind, share, parts = "compute-bound", unknown, ("other_kernel",)
    what = "GPU" if rank.account.on_gpu else "CPU"
    total = rank.working
    top = ", ".join(f"{n} ({_ms(ns)})" for n, ns in _top_work(rank, parts))
    also = ""
    if moved >= NOTABLE / 5:
        also = f" (copies on the device and fills {_percent(moved)})"
    if unknown > share / 2:
        also += f", of other kinds {_percent(unknown)}"
    low, high = rank.gpu_window()
    busy = sum(rank.parts[p] for p in names.WORK) / max(high - low, 1)
    evidence = (
        f"the {what} works {_percent(total)} of the span (it is busy "
        f"{_percent(busy)} from its first to its last event): products and "
        f"attention {_percent(products)}, element-wise, copies and optimizer "
        f"{_percent(streams)}{also}; most in {top}; idle "
        f"{_percent(rank.share(*names.IDLE))}"
    )
    cure = COPYING if streams > products and 2 * moved > streams else None
    if parts == ("other_kernel",):  # what bounds it, counters must say
        cure = COUNTERS if rank.account.on_gpu else OPERATORS
    return _finding(kind, rank, share, share, evidence, cure)


def copying(rank):
    """Copies on the device and fills use its memory, and compute nothing."""
    share = rank.share("copy_d2d")
    if not rank.account.on_gpu or share < NOTABLE:
        return None
    row = copies(rank)["copy_d2d"]
    top = ", ".join(
        f"{n} ({_ms(ns)})" for n, ns in _top_work(rank, ["copy_d2d"])
    )
    length, start = rank.longest("copy_d2d")
    evidence = (
        f"{row['count']:,} copies on the device and fills, {top}; "
        f"{_ms(rank.parts['copy_d2d'])} of it beside no computing, longest "
        f"{_ms(length)} at {rank.at(start)}: clones, contiguous(), "
        "concatenations and zeros read and write memory, and compute nothing"
    )
    return _finding("bandwidth-bound", rank, share, share, evidence, COPYING)


def _top_work(rank, parts, count=3):
    trace, account = rank.trace, rank.account
    mine = account.gpu[np.isin(account.work, [CODE[c] for c in parts])]
    sums = np.zeros(len(trace.names), np.int64)
    np.add.at(sums, trace.name[mine], (trace.end - trace.start)[mine])
    events, kinds, starts, ends = account.between
    kept = np.isin(kinds, [CODE[c] for c in parts])
    np.add.at(sums, trace.name[events[kept]], (ends - starts)[kept])
    best = [n for n in np.argsort(-sums)[:count] if sums[n] > 0]
    if not best:
        return [("nothing", 0)]
    return [(_short(trace.names[n]), int(sums[n])) for n in best]


def _short(name):
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if len(name) <= 60 else name[:59] + "…"


WAITS = (
    data_bound,
    host_bound,
    sync_bound,
    transfer_bound,
    communication_bound,
    start_up,
    compilation,
    copying,
)


def findings_of(rank):
    """Return one rank's findings, those with most to gain first."""
    if rank.unread:
        return [_no_gpu(rank)]
    if rank.too_short:
        tried = (start_up, compilation, sync_bound)
    else:
        tried = WAITS
    found = [f for function in tried if (f := function(rank))]
    upper = ("host-bound", "data-bound", "sync-bound")
    found.sort(
        key=lambda f: (rank.sampled and f["kind"] in upper, -f["gain_bound"])
    )
    if not rank.too_short and rank.working >= NOTABLE:
        waits = max((f["gain_bound"] for f in found), default=0.0)
        idle = rank.share(*names.IDLE)
        most = rank.working >= COMPUTING
        most |= not found and rank.working > idle
        if most or (idle < LITTLE_IDLE and 2 * waits < rank.working):
            work = working(rank)
            if work["kind"] == "bandwidth-bound":  # these copies included
                found = [f for f in found if f["kind"] != work["kind"]]
            found.insert(0 if most else len(found), work)
    if not rank.account.on_gpu:
        # what would stop a GPU is said before what keeps this CPU busy
        found.sort(key=lambda f: f["kind"] != "sync-bound")
    return found


def _no_gpu(rank):
    """Return the finding that a trace does not show what it should."""
    gpu = of_gpu_job(rank.trace)
    said = {w["kind"]: w["text"] for w in rank.trace.warnings}
    cut = "truncated" in said
    evidence = (
        said["unknown-device"]
        if "unknown-device" in said
        else "no kernel is in the part of the file that could be read: it is "
        "cut short, and kernels stand behind the host's events; copy it again"
        if cut
        else "kernels were not recorded, though the program uses a GPU: add "
        "ProfilerActivity.CUDA, or this rank never launched any"
        if gpu
        else "neither operators nor kernels are in the file: nothing was "
        "recorded of what the program did (py-spy sees Python alone)"
    )
    return _finding("no-gpu-events", rank, 1.0, 0.0, evidence)


# ---- several ranks -------------------------------------------------------


def straggler(ranks):
    """Find the rank that the others wait for in their collectives.

    A collective ends for all ranks together, so that the one that comes
    last waits least: its kernel is the shortest.
    """
    found = waits_by_rank(ranks)
    if found is None:
        return None
    waits, matched = found
    late = min(range(len(ranks)), key=lambda i: waits[i])
    others = [i for i in range(len(ranks)) if i != late]
    middle = float(np.median([waits[i] for i in others]))
    gains = []
    for i in others:
        exposed = ranks[i].parts["communication"]
        gains.append(min(waits[i] - waits[late], exposed) / ranks[i].span)
    gain = float(np.mean(gains))
    if gain < NOTABLE or waits[late] > 0.6 * middle:
        return None
    most = max(others, key=lambda i: waits[i])
    evidence = (
        f"{matched}: rank {ranks[late].number} waits {_ms(waits[late])} in "
        f"them, the others {_ms(middle)} in the middle and "
        f"{_ms(waits[most])} at most (rank {ranks[most].number}), so it "
        "comes last; that time is in the others' communication"
    )
    return _finding("straggler", ranks[late], gain, gain, evidence)


def waits_by_rank(ranks):
    """Return (ns each rank waits in its collectives, how that was found).

    Recordings begin apart, and one long wait is not yet a habit: where
    another rank is last, or none, once the collective with most waiting is
    left out, the others alone are counted.
    """
    if len(ranks) < 2:
        return None
    lengths = []
    for rank in ranks:
        trace, account = rank.trace, rank.account
        events = account.gpu[account.work == CODE["communication"]]
        lengths.append((trace.end - trace.start)[events])
    counts = {len(one) for one in lengths}
    if 0 in counts:
        return None
    if len(counts) == 1:
        table = np.stack(lengths)
        table = table - table.min(axis=0)
        matched = f"{len(table[0])} collectives, matched in order"
        waits = table.sum(axis=1)
        less = np.delete(table, table.sum(axis=0).argmax(), axis=1)
        rest = less.sum(axis=1)
        late = waits.argmin()
        left = np.median(np.delete(rest, late)) - rest[late]
        if left < 0.4 * NOTABLE * max(rank.span for rank in ranks):
            waits = rest
            matched += ", without the one in which most is waited"
    else:
        waits = np.array([int(one.sum()) for one in lengths])
        waits = waits - waits.min()
        matched = "collectives of each rank together"
    return [int(w) for w in waits], matched


def several(ranks):
    """Return the findings over all ranks, at most three."""
    by_kind = {}
    for rank in ranks:
        for finding in findings_of(rank):
            by_kind.setdefault(finding["kind"], []).append(finding)
    if not all(rank.unread for rank in ranks):
        by_kind.pop("no-gpu-events", None)  # a note, beside what was read
    if len(ranks) == 1:
        return [f for rows in by_kind.values() for f in rows][:MOST]
    ordered = []
    for rows in by_kind.values():
        mean = sum(row["gain_bound"] for row in rows) / len(ranks)
        worst = max(rows, key=lambda row: row["share_of_span"])
        worst = dict(worst)
        worst["evidence"] += (
            f" ({len(rows)} of {len(ranks)} ranks, on average "
            f"{_percent(mean)} of the span)"
        )
        ordered.append((mean, worst))
    late = straggler(ranks)
    if late:
        ordered.append((late["gain_bound"], late))
    busy = sum(rank.working for rank in ranks) / len(ranks) >= COMPUTING
    ordered.sort(
        key=lambda pair: (not busy and pair[1]["kind"] in WORKING, -pair[0])
    )
    chosen = [finding for _, finding in ordered[:MOST]]
    if late and late not in chosen:
        chosen[-1] = late
    return chosen


# ---- warnings ------------------------------------------------------------


def warnings_of(rank):
    """Say what is missing in a trace, and when it is not worth reading."""
    trace, account = rank.trace, rank.account
    said = list(trace.warnings)

    def warn(kind, text):
        said.append({"kind": kind, "text": text})

    if not account.on_gpu and not rank.unread:
        warn(
            "no-gpu-events",
            "no kernel and no copy is in the file: read as a CPU program, "
            "where the innermost operators are the work",
        )
    start = rank.share("idle_start_up") - rank.allocating
    if start >= STARTING or rank.begins_late:
        much = f" ({_percent(start)} of it)" if start >= STARTING else ""
        worth = "it is not worth reading as a picture of the program's steps"
        if STARTING <= start < 0.5:
            worth = "what follows it is worth reading, the totals are not"
        warn(
            "start-up",
            f"the program's start is in the recording{much}: {worth}; record "
            "after a warm-up (torch.profiler.schedule)",
        )
    if rank.unexplained > UNEXPLAINED and seen(trace):
        warn(
            "unexplained-idle",
            f"{_percent(rank.unexplained)} of the span is idle and "
            "no event says why: not worth reading, unless the program did "
            "something else meanwhile; an event with a wrong clock also "
            "looks like this",
        )
    if rank.queued >= NOTABLE:
        lows, highs, launched = account.queued
        most = int(np.argmax(highs - lows))
        before = f"{_ms(int(lows[most] - launched[most]))} before that"
        if launched[most] <= trace.window[0]:
            before = "before the recording began"
        warn(
            "queued-work",
            f"for {_percent(rank.queued)} of the span work was launched and "
            f"did not start: longest {_ms(int((highs - lows)[most]))} at "
            f"{rank.at(lows[most])}, launched {before}. It waits for another "
            "stream or rank, or inside a graph, or events are missing; the "
            "host is not to blame",
        )
    if rank.share("idle_compilation") >= NOTABLE:
        warn(
            "compilation",
            f"{_percent(rank.share('idle_compilation'))} of the span is "
            "compilation: not worth reading as a picture of later steps",
        )
    if rank.too_short:
        calls = _named_calls(rank)
        waits = f"; the host waits in {calls}" if calls else ""
        warn(
            "too-short",
            f"{_counted(len(account.gpu), 'GPU event')} in {_ms(rank.span)}: "
            f"too short to judge{waits}",
        )
    if len(account.steps) == 1:
        warn(
            "partial-step",
            f"one marked step only ({account.steps[0][0]}): nothing to "
            "compare it with",
        )
    elif not account.steps:
        warn(
            "no-step-marks",
            "no step is marked: give torch.profiler.profile a schedule= and "
            "call prof.step() after each step, or wrap each in "
            "record_function('ProfilerStep#n')",
        )
        if steps_of(rank) == 1:
            warn(
                "partial-step",
                "one step only: nothing to compare it with; a first one "
                "also makes what later ones keep, such as the optimizer's "
                "state",
            )
    rows = copies(rank)
    if rows and all(row["bytes"] is None for row in rows.values()):
        warn("no-byte-counts", "copies were recorded without their bytes")
    if account.on_gpu:
        if not seen(trace):
            warn(
                "no-host-events",
                "no operator and no call of the host was recorded "
                "(ProfilerActivity.CPU): why the GPU is idle cannot be said",
            )
        elif not (trace.kind == names.OPERATOR).any():
            warn(
                "no-operators",
                "no operator was recorded: what the host did between its "
                "calls of the driver cannot be said",
            )
        known = float((account.launch >= 0).mean()) if len(account.gpu) else 1
        if known < 0.5:
            warn(
                "no-launches",
                f"only {_percent(known)} of the GPU events have their launch "
                "in the file: the causes of idle time are less sure",
            )
        devices = {trace.lanes[lane][0] for lane in trace.lane[account.gpu]}
        if len(devices) > 1:
            warn(
                "several-devices",
                f"{len(devices)} GPUs in one file, read together: one is "
                "idle only when all are",
            )
    _warn_of_world(rank, warn)
    return said


def _warn_of_world(rank, warn):
    trace = rank.trace
    talks = rank.account.total_ns("communication") > 0 or any(
        names.CPU_COMMUNICATION.match(n) for n in trace.names
    )
    if talks and trace.world is None:
        missing = "rank or " if trace.rank is None else ""
        warn(
            "no-distributed-info",
            f"the file does not give the {missing}number of ranks, though "
            "the program communicates",
        )


def warnings_of_all(ranks):
    """Return the warnings of all ranks, and those about the set of them."""
    said, merged = {}, []
    unread = [rank for rank in ranks if rank.unread]
    if len(unread) < len(ranks):  # else it is the finding
        for rank in unread:
            row = rank, _no_gpu(rank)["evidence"]
            said.setdefault("no-gpu-events", []).append(row)
    for rank in ranks:
        for warning in warnings_of(rank):
            key = warning["kind"]
            said.setdefault(key, []).append((rank, warning["text"]))
    for kind, rows in said.items():
        text = rows[0][1]
        if len(ranks) > 1:
            count = len({id(rank) for rank, _ in rows})
            which = (
                "all ranks"
                if count == len(ranks)
                else "rank "
                + ", ".join(
                    dict.fromkeys(str(rank.number) for rank, _ in rows)
                )
            )
            text = f"{which}: {text}"
        merged.append({"kind": kind, "text": text})
    present = sorted({rank.number for rank in ranks})
    world = max((r.trace.world or 0 for r in ranks), default=0)
    if world > len(present):
        merged.append(
            {
                "kind": "missing-ranks",
                "text": f"only rank {_listed(present)} of {world}: whether "
                "these wait for the others cannot be seen",
            }
        )
    if len(present) < len(ranks):
        merged.append(
            {
                "kind": "duplicate-ranks",
                "text": "several files are of the same rank; ranks are "
                "compared as if they were of one run",
            }
        )
    return merged


def _listed(numbers):
    shown = ", ".join(str(n) for n in numbers[:8])
    return shown + (", …" if len(numbers) > 8 else "")


# ---- all of it -----------------------------------------------------------


def rank_row(rank):
    """Return what ``--json`` says about one rank."""
    account = rank.account
    low, high = rank.gpu_window()
    inner = account.parts_ns(low, high)
    computing = sum(inner[p] for p in names.COMPUTE)
    idle = sum(inner[p] for p in names.IDLE)
    return {
        "rank": rank.number,
        "file": rank.trace.label,
        "world": rank.trace.world,
        "device": device(rank.trace),
        "span_us": account.span_ns / 1e3,
        "parts": {name: ns / 1e3 for name, ns in rank.parts.items()},
        "hidden": {
            name: (account.total_ns(name) - rank.parts[name]) / 1e3
            for name in names.WORK
        },
        "gpu_span": {
            "start_us": low / 1e3,
            "span_us": (high - low) / 1e3,
            "compute_us": computing / 1e3,
            "other_us": (high - low - computing - idle) / 1e3,
            "idle_us": idle / 1e3,
        },
        "steps": [
            {
                "name": name,
                "start_us": start / 1e3,
                "span_us": (end - start) / 1e3,
                "parts": {
                    part: ns / 1e3
                    for part, ns in account.parts_ns(start, end).items()
                    if ns
                },
            }
            for name, start, end in account.steps
        ],
        "copies": copies(rank),
        "waiting_calls": waiting_calls(rank),
        "batch": rank.trace.batch,
    }


def device(trace):
    """Return the name of the first GPU in a trace's header, or None."""
    found = trace.header.get("deviceProperties")
    if isinstance(found, list) and found and isinstance(found[0], dict):
        return str(found[0].get("name", "")) or None
    return None


def number(traces):
    """Give every trace a rank: its own, or the next free number."""
    taken = {t.rank for t in traces}
    free = (n for n in range(len(traces) + len(taken) + 1) if n not in taken)
    return [Rank(t, next(free) if t.rank is None else t.rank) for t in traces]


def judge(ranks):
    """Return the report of these ranks: what ``--json`` prints."""
    return {
        "ranks": [rank_row(rank) for rank in ranks],
        "findings": several(ranks),
        "warnings": warnings_of_all(ranks),
    }
